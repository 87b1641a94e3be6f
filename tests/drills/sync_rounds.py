"""The rounds of the weight sync's drill, one after the other, and what becomes of them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import psutil

from tests.drills.setting import Setting
from tests.drills.sync_fleet import Fleet, Stuck
from tests.drills.sync_generator import Generator
from tests.drills.sync_setting import HEARTBEAT_S, MEMBER_TIMEOUT_S, SYNC
from tests.drills.sync_tally import FAULT, OTHER, QUIET, STARTING, Tally
from tests.drills.sync_tap import Shot

GENERATORS = 3
KILLS_PER_STOP = 10
BUCKETS = 70  # of a whole version, and a little more: a round's trigger is somewhere within one
AT_ANY_MOMENT = 0.2  # chance that a kill looks at the clock and not at the transfer
SAME_NAME, AT_ONCE = 0.5, 0.5  # chances that a replacement takes the killed one's name; comes before all is well again
NEWCOMER = 0.3  # chance, where it does not come at once, that one before it is killed in its first transfer
QUIET_S = (0.6, 1.2)
HIT_S = 30.0  # for a transfer to come that can be hit
# Of an attempt that fails: its deadline, the answers to its end, and the next attempt. Twice that, as starts share the
# processors; and a member that is given up only then.
TAKEN_S = MEMBER_TIMEOUT_S + 2 * (2 * SYNC.sync_timeout_s + 4.0)
SERVED_S = 15.0 + TAKEN_S


class Drill:
    """The driver."""

    def __init__(self, setting: Setting, kills: int) -> None:
        self.fleet, self.tally = Fleet(setting), Tally()
        self._rng = random.Random(setting.seed)
        self._kills, self._stops = kills, max(1, kills // KILLS_PER_STOP)

    def run(self) -> None:
        """All of it. Raises Stuck."""
        fleet = self.fleet
        fleet.open()
        for one in [fleet.spawn() for _ in range(GENERATORS)]:
            fleet.wait(lambda one=one: fleet.serves(one, 0), SERVED_S, f"{one.name} does not serve")  # type: ignore[misc]
        while lacking := self._lacking():
            self._rng.choice(lacking)()
            self._settle()
            if self.tally.settled % 10 == 0:
                print(f"{len(self.tally.kills)} kills, {len(self.tally.stops)} stops", flush=True)
        self._all_gone_and_one_comes()
        self._all_gone()

    def close(self) -> None:
        """Ends everything."""
        self.fleet.close()

    def findings(self) -> list[str]:
        """What is wrong, after ``close``."""
        fleet = self.fleet
        if fleet.learner is None or fleet.audit is None:
            return ["the drill did not begin"]
        fleet.audit.everything(fleet.names)
        left = [f"process {pid} ({name}) is left" for pid, name in fleet.names.items() if psutil.pid_exists(pid)]
        return [*fleet.learner.wrong, *fleet.audit.wrong, *left]

    def summary(self) -> list[str]:
        """What has been seen."""
        fleet = self.fleet
        if fleet.learner is None or fleet.audit is None:
            return []
        return self.tally.lines(fleet.learner, fleet.tap, len(fleet.audit.checked))

    # -- rounds --------------------------------------------------------------------------------------------------
    def _kill_one(self) -> None:
        """One generator is killed; the others take a newer version, and so does the one that comes in its place.

        Sometimes the one that comes is killed first, while it is sent its first version, which is a whole one.
        """
        fleet = self.fleet
        victim, others = self._chosen()
        shot, version = self._fire(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        self._count_kill(victim, shot)
        name = victim.name if self._rng.random() < SAME_NAME else ""
        early = self._rng.random() < AT_ONCE
        if early:
            fleet.rest(self._rng.uniform(0.0, 1.0))
            self._phase(STARTING)
            started_at, new = time.monotonic(), fleet.spawn(name)
        self._await_newer(others, version)
        self.tally.survivors_s.append(time.monotonic() - killed_at)
        if not early:
            self._phase(STARTING)
            if len(self.tally.kills) < self._kills and self._rng.random() < NEWCOMER:
                self._kill_newcomer(others)
            started_at, new = time.monotonic(), fleet.spawn(name)
        fleet.wait(lambda: fleet.serves(new, version + 1), SERVED_S, f"{new.name} does not serve after {version}")
        self._phase(OTHER)
        self.tally.served_s.append(time.monotonic() - started_at)
        self.tally.same_name += bool(name)

    def _kill_newcomer(self, others: list[Generator]) -> None:
        """A generator is killed somewhere in its first transfer."""
        new = self.fleet.spawn()
        shot, version = self._shot_at(new, signal.SIGKILL)
        killed_at = time.monotonic()
        self._count_kill(new, shot)
        self.tally.newcomers += 1
        self._await_newer(others, version)
        self.tally.survivors_s.append(time.monotonic() - killed_at)

    def _count_kill(self, victim: Generator, shot: Shot) -> None:
        self.tally.kills.append(shot)
        self.fleet.bury(victim)

    def _stop_one(self) -> None:
        """One generator stands still until everyone has given it up; then it goes on, and comes back by itself."""
        fleet = self.fleet
        victim, others = self._chosen()
        pid = victim.pid
        shot, version = self._fire(victim, signal.SIGSTOP)
        stopped_at = time.monotonic()
        self.tally.stops.append(shot)
        self._await_newer(others, version)
        self.tally.stops_survivors_s.append(time.monotonic() - stopped_at)
        self._phase(OTHER)
        limit = MEMBER_TIMEOUT_S + 5.0
        fleet.wait(lambda: not fleet.there(victim), limit, f"{victim.name} is stopped and still a member")
        fleet.rest(self._rng.uniform(0.5, 4.0))
        if (stood := time.monotonic() - stopped_at) < max(MEMBER_TIMEOUT_S - HEARTBEAT_S, SYNC.sync_timeout_s):
            raise Stuck(f"{victim.name} was given up {stood:.1f} s after it was stopped, too soon")
        missed = self._version()
        victim.signal(signal.SIGCONT)
        took = fleet.wait(
            lambda: fleet.serves(victim, missed), SERVED_S, f"{victim.name} was stopped and does not serve {missed}"
        )
        assert victim.running() and victim.pid == pid
        self.tally.resumed_s.append(took)

    def _lacking(self) -> list[Callable[[], None]]:
        """The rounds that are still to be made, in any order."""
        kills, stops = self._kills - len(self.tally.kills), self._stops - len(self.tally.stops)
        return [self._kill_one] * kills + [self._stop_one] * stops

    def _settle(self) -> None:
        """With the learner standing still, everyone comes to hold its newest version."""
        fleet = self.fleet
        assert fleet.learner is not None
        if not fleet.learner.pause(TAKEN_S):
            raise Stuck(f"the learner's step does not end\n{fleet.standing()}")
        newest = fleet.learner.version
        for one in fleet.alive:
            fleet.wait(lambda one=one: fleet.uses(one, newest), TAKEN_S, f"{one.name} does not take {newest}")  # type: ignore[misc]
        self.tally.settled += 1
        fleet.learner.resume()

    # -- the end -------------------------------------------------------------------------------------------------
    def _all_gone_and_one_comes(self) -> None:
        """The learner says that it waits, and goes on when somebody comes."""
        fleet, limit = self.fleet, SYNC.no_generator_timeout_s
        killed_at = self._kill_all()
        said = fleet.wait(lambda: bool(self._waiting(killed_at)), limit / 2, "the learner does not say that it waits")
        fleet.rest(max(0.0, limit / 2 - (time.monotonic() - killed_at)))
        missed, one = self._version(), fleet.spawn()
        took = fleet.wait(lambda: fleet.serves(one, missed), SERVED_S, f"{one.name}, alone, does not serve {missed}")
        self.tally.notes += [
            f"all killed: after {said:.1f} s the learner says: {self._waiting(killed_at)[0]}",
            f"one came after {limit / 2:g} s, and served {took:.1f} s later",
        ]
        more = [fleet.spawn() for _ in range(GENERATORS - 1)]
        for other in more:
            fleet.wait(lambda other=other: fleet.serves(other, missed), SERVED_S, f"{other.name} does not serve")  # type: ignore[misc]

    def _all_gone(self) -> None:
        """Nobody comes: NoReceiver, in time, with the errors of those who were there."""
        fleet = self.fleet
        names = {one.name for one in fleet.alive}
        limit = SYNC.no_generator_timeout_s + 5.0
        fleet.may_give_up = True
        killed_at = self._kill_all()
        fleet.wait(self._gave_up, limit, "the learner does not give up")
        took = time.monotonic() - killed_at
        assert fleet.learner is not None
        text = str(fleet.learner.failure)
        self.tally.notes.append(f"all killed again: after {took:.1f} s NoReceiver: {text}")
        blamed = {name for name in {*fleet.names.values(), "learner"} if f"{name}: " in text}
        if not blamed & names or not blamed <= names | {"learner"}:
            raise Stuck(f"{sorted(names)} were the last ones, but the error blames {sorted(blamed)}: {text}")
        if "no_generator_timeout_s" not in text or took < SYNC.no_generator_timeout_s - 5.0:
            raise Stuck(f"gave up after {took:.1f} s with: {text}")

    def _kill_all(self) -> float:
        """At one moment, in the middle of a transfer."""
        fleet = self.fleet
        first = self._rng.choice(fleet.alive)
        everyone = list(fleet.alive)

        def fire() -> None:
            for one in everyone:
                one.signal(signal.SIGKILL)

        self._phase(OTHER)
        fleet.tap.arm(first.name, self._rng.randint(1, BUCKETS), fire)
        fleet.wait(lambda: fleet.tap.fired() is not None, HIT_S, "no transfer to hit")
        for one in everyone:
            fleet.bury(one)
        return time.monotonic()

    # -- parts of a round ----------------------------------------------------------------------------------------
    def _chosen(self) -> tuple[Generator, list[Generator]]:
        victim = self._rng.choice(self.fleet.alive)
        return victim, [one for one in self.fleet.alive if one is not victim]

    def _fire(self, victim: Generator, signum: signal.Signals) -> tuple[Shot, int]:
        """Sends the signal after a while without a fault; the version that was newest then."""
        self._phase(QUIET)
        self.fleet.rest(self._rng.uniform(*QUIET_S))
        if signum is signal.SIGKILL and self._rng.random() < AT_ANY_MOMENT:
            shot, version = self.fleet.tap.shoot(victim.name, lambda: victim.signal(signum)), self._version()
        else:
            shot, version = self._shot_at(victim, signum)
        self._phase(FAULT)
        return shot, version

    def _shot_at(self, victim: Generator, signum: signal.Signals) -> tuple[Shot, int]:
        """Sends the signal in the middle of a transfer to the victim."""
        fleet = self.fleet
        fleet.tap.arm(victim.name, self._rng.randint(1, BUCKETS), lambda: victim.signal(signum))
        fleet.wait(lambda: fleet.tap.fired() is not None, HIT_S, f"no transfer to {victim.name} to hit")
        shot = fleet.tap.fired()
        assert shot is not None
        return shot, self._version()

    def _await_newer(self, others: list[Generator], version: int) -> None:
        for one in others:
            self.fleet.wait(
                lambda one=one: self.fleet.uses(one, version + 1),  # type: ignore[misc]
                TAKEN_S,
                f"{one.name} takes no version after {version}",
            )

    def _phase(self, phase: str) -> None:
        assert self.fleet.learner is not None
        self.fleet.learner.phase = phase

    def _version(self) -> int:
        assert self.fleet.learner is not None
        return self.fleet.learner.version

    def _gave_up(self) -> bool:
        assert self.fleet.learner is not None
        return self.fleet.learner.gave_up

    def _waiting(self, since: float) -> list[str]:
        return self.fleet.heard.since(since, "no_generator_timeout_s")
