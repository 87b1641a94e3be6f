"""The kill drill: ``python -m tests.drills.broker_kills --kills 200 --backend zmq|redis --durability disk|memory``.

    driver ─SIGKILL, start again─► broker, learner, three generators       (real processes, fake weights, no torch)
    observer ─state()─► broker                                             (the books, in every look)
    verdict ◄─ the final checkpoint's lineage, the final ledger            (every item exactly once, or dead)

Random kills of random processes while three epochs are trained; kills and training keep pace, whichever is behind is
let catch up. The last line says ``exact: true``, or ``exact: false`` and what was wrong. The exit status is 0 only when
all was exact and no process has ended by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

from broker.connect import connect
from broker.messages import Counts
from learners.checkpoint import Checkpoints
from tests.drills.history import newest
from tests.drills.observer import Observer
from tests.drills.processes import Process
from tests.drills.setting import HEARTBEAT_S, LEASE_TIMEOUT_S, MEMBER_TIMEOUT_S, SILENCE_S, Setting
from tests.drills.verdict import SHOWN, wrong_books, wrong_items

GENERATORS = 3
WEIGHTS = {"broker": 0.3, "learner": 0.25, "generator": 0.45 / GENERATORS}
PROMPTS_PER_KILL = 8  # an epoch has so many for each kill: three epochs last as long as the kills
MEAN_GAP_BEHIND_S, MEAN_GAP_AHEAD_S = 0.4, 1.2  # between kills, by whether they are behind the training
MOST_AHEAD = 4  # kills; on a loaded machine nobody would ever get past its start otherwise
LONGEST_DOWN_S = 0.5
TURN_S = 0.01
CRASHES_ALLOWED = 20


class Stuck(Exception):
    """No progress, or processes that end by themselves; says where everyone stands."""


class Drill:
    """The driver. Everything it starts dies with it, or in ``close``."""

    def __init__(self, setting: Setting, kills: int) -> None:
        directory = Path(setting.directory)
        self.setting, self._kills_wanted, self._rng = setting, kills, random.Random(setting.seed)
        names = [f"generator-{i}" for i in range(GENERATORS)]
        self.broker = Process("broker", "broker_process", directory)
        self.learner = Process("learner", "learner_process", directory)
        self._generators = [Process(name, "generator_process", directory, name) for name in names]
        self.processes = [self.broker, self.learner, *self._generators]
        self.broker.start()
        self._await_url()
        self.observer = Observer(setting)
        self.crashes: list[str] = []
        self._next_kill_at = time.monotonic() + 2.0
        self._killed_at = time.monotonic()

    @property
    def kills(self) -> int:
        """Made so far."""
        return sum(one.kills for one in self.processes)

    def run(self) -> None:
        """Until the kills are made and the learner has trained everything. Raises Stuck."""
        self.observer.start()
        while not self.learner.done:
            self._start_again()
            if self.kills >= self._kills_wanted:
                self.setting.all_killed.touch()
            elif time.monotonic() >= self._next_kill_at:
                self._kill_one()
            self._check_progress()
            time.sleep(TURN_S)

    def final_counts(self) -> Counts:
        """The ledger as the broker has it now."""
        client = connect(self.setting.config(), self.setting.url)
        counts = client.state().counts
        client.close()
        return counts

    def close(self) -> None:
        """Ends everything."""
        self.observer.close()
        for one in self.processes:
            one.stop()

    def _await_url(self) -> None:
        until = time.monotonic() + SILENCE_S
        while not self.setting.url_file.exists():
            if time.monotonic() > until or not self.broker.running():
                raise SystemExit(f"the broker did not start\n{self.broker.standing()}")
            time.sleep(TURN_S)

    def _start_again(self) -> None:
        for one in self.processes:
            if text := one.crashed():
                self.crashes.append(text)
                one.wanted_at = time.monotonic() + LONGEST_DOWN_S
                if len(self.crashes) > CRASHES_ALLOWED:
                    raise Stuck(f"{len(self.crashes)} processes have ended by themselves\n{self.standing()}")
            if one.wanted_at is not None and time.monotonic() >= one.wanted_at:
                one.start()

    def _kill_one(self) -> None:
        """Only who is past the interpreter's start: what interests us begins with the first line of its program."""
        alive = [one for one in self.processes if one.up()]
        ahead = self.kills - self._kills_wanted * self.observer.ended / self.setting.total
        if not alive or ahead > MOST_AHEAD:
            return
        (victim,) = self._rng.choices(alive, [WEIGHTS[one.role] for one in alive])
        victim.kill(again_after_s=self._rng.uniform(0.0, LONGEST_DOWN_S))
        self._killed_at = time.monotonic()
        mean = MEAN_GAP_BEHIND_S if ahead < 0 else MEAN_GAP_AHEAD_S
        self._next_kill_at = self._killed_at + self._rng.expovariate(1.0 / mean)

    def _check_progress(self) -> None:
        """An item that ends is progress; so is a kill, once only the last item is left, which waits for the kills."""
        moved_at = self.observer.moved_at
        if self.observer.ended >= self.setting.total - 1:
            moved_at = max(moved_at, self._killed_at)
        if time.monotonic() - moved_at > SILENCE_S:
            raise Stuck(f"nothing has ended for {SILENCE_S:g} s\n{self.standing()}")

    def standing(self) -> str:
        """Where everyone stands."""
        seen = self.observer.last
        return "\n".join([f"{self.kills} kills; last look: {seen}", *(one.standing() for one in self.processes)])


def judge(drill: Drill) -> list[str]:
    """What is wrong after the end; with a broker that remembers, also after one more restart of it."""
    setting = drill.setting
    wrong = list(drill.observer.wrong)
    version, frontier, history = newest(Checkpoints(Path(setting.directory, "checkpoints"), keep=1))
    items, missing = wrong_items(setting, version, frontier, history)
    counts = drill.final_counts()
    wrong += items + wrong_books(setting, counts, history, missing)
    if setting.disk:
        drill.broker.stop()
        drill.broker.start()
        again = drill.final_counts()
        if {**vars(again), "events": None} != {**vars(counts), "events": None}:
            wrong.append(f"after one more restart the ledger is {again}; it was {counts}")
    undone = sum(1 for one in Path(setting.directory, "lives").iterdir()) - len(history.lives)
    print(f"version {version}, {len(history.lives)} lives of the learner in its lineage, {undone} others")
    print(
        f"trained {sum(len(step.trained) for step in history.steps)} of {setting.total} items; final ledger: {counts}"
    )
    if missing:
        print(f"died after the last batch, so that only the ledger knows: {missing}")
    return wrong


def report(drill: Drill, wrong: list[str], seconds: float) -> None:
    """Figures, crashes, and the last line that says it all."""
    kills: Counter[str] = Counter()
    for one in drill.processes:
        kills[one.role] += one.kills
    starts = sum(one.starts for one in drill.processes)
    observer = drill.observer
    print(f"{drill.kills} kills: {dict(kills)}; {starts} starts; {seconds:.1f} s")
    print(f"{observer.looks} observations, {observer.unreachable} times the broker was not reached")
    print(f"{len(drill.crashes)} processes ended by themselves")
    for text in drill.crashes:
        print(f"ended by itself: {text}")
    for text in wrong[:SHOWN]:
        print(f"wrong: {text}")
    print("exact: true" if not wrong else f"exact: false: {len(wrong)} findings; first: {wrong[0].splitlines()[0]}")


def prepare(args: argparse.Namespace, directory: Path) -> Setting:
    """Settles address, password and size."""
    broker: dict[str, object] = {
        "backend": args.backend,
        "port": _free_port(),
        "lease_timeout_s": LEASE_TIMEOUT_S,
        "member_timeout_s": MEMBER_TIMEOUT_S,
        "heartbeat_s": HEARTBEAT_S,
        "reconnect_timeout_s": SILENCE_S,
        "durability": args.durability,
        "data_dir": str(directory / "data"),
    }
    setting = Setting(
        driver_pid=os.getpid(),
        directory=str(directory),
        broker=broker,
        password=secrets.token_urlsafe(12),
        size=args.prompts or PROMPTS_PER_KILL * args.kills,
        seed=args.seed,
    )
    setting.write()
    return setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--backend", choices=["zmq", "redis"], default="zmq")
    parser.add_argument("--durability", choices=["disk", "memory"], default="memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=0, help="prompts an epoch; 0: in proportion to the kills")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="slipstream-drill-"))
    drill = Drill(prepare(args, directory), args.kills)
    began = time.monotonic()
    try:
        drill.run()
        wrong = judge(drill)
    except Stuck as stuck:
        wrong = [str(stuck)]
    finally:
        drill.close()
    if wrong or drill.crashes:
        print(f"logs and checkpoints: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    report(drill, wrong, time.monotonic() - began)
    return 1 if wrong or drill.crashes else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
