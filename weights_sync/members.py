"""Who receives: the publisher's view of the generators, and a thread that keeps it fresh."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from broker.contract import Broker
from broker.messages import Member, MemberState, Publication
from weights_sync.errors import NoReceiver

log = logging.getLogger(__name__)

STRIKES = 3  # failures in a row after which a receiver is left out until its process is replaced
# How an attempt ended for a receiver that could not say so itself, or for which others waited in vain.
GONE, SILENT = "is gone", "does not answer"
LATE = "did not come for its part in time (deadline: weights_sync.sync_timeout_s)"
_LIVE = (MemberState.SYNCING, MemberState.SERVING, MemberState.STALE, MemberState.SUSPECT)
_POLL_S = 1.0  # one long poll; bounds how long closing takes


def key(member: Member) -> tuple[str, int]:
    """A member's process: a restarted generator may come back under the same id but shares nothing with the old."""
    return member.member_id, member.pid


def live(members: Sequence[Member]) -> tuple[Member, ...]:
    """Generators that can take a version: their model is loaded and they are not on their way out."""
    return tuple(m for m in members if m.role == "generator" and m.state in _LIVE)


def holds(member: Member, *, version: int, incarnation: int) -> bool:
    """Whether the member reports this version of this incarnation as in use."""
    return member.policy_version == version and member.incarnation == incarnation


def at_fault(failures: Mapping[int, str]) -> set[int]:
    """Ranks to blame for a failed attempt: the gone, silent and late if there are any; they break it for the others.

    Nor is anyone else to blame where the learner (rank 0) has failed.
    """
    culprits = {rank for rank, error in failures.items() if error in (GONE, SILENT, LATE)}
    return culprits or (set() if 0 in failures else set(failures))


def lacks(
    receivers: Iterable[tuple[int, Member]], members: Sequence[Member], *, version: int, incarnation: int
) -> list[int]:
    """The ranks of the receivers that do not report the version, as the members are now."""
    now = {key(member): member for member in members}
    return [
        rank
        for rank, one in receivers
        if key(one) not in now or not holds(now[key(one)], version=version, incarnation=incarnation)
    ]


@dataclass(kw_only=True)
class Blame:
    """Failures in a row, per process; a success clears them."""

    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    resting: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def strike(self, member: Member, error: str, *, times: int = 1) -> None:
        """Counts a failure of this member."""
        self.counts[key(member)] = self.counts.get(key(member), 0) + times
        self.last[member.member_id] = error

    def clear(self, member: Member) -> None:
        """Forgets the failures of a member that has just taken a version."""
        self.counts.pop(key(member), None)
        self.resting.pop(key(member), None)
        self.last.pop(member.member_id, None)

    def book(self, publication: Publication, members: Sequence[Member], failures: Mapping[int, str]) -> None:
        """Says how an attempt failed for each rank (the learner's is 0), and counts it for those at fault."""
        version, guilty = publication.version, at_fault(failures)
        for rank, member in enumerate(members, start=1):
            if rank in failures:
                log.warning(
                    "version %d, attempt %d: rank %d (%s) %s",
                    version, publication.attempt, rank, member.member_id, failures[rank],
                )  # fmt: skip
                if rank in guilty:
                    self.strike(member, f"rank {rank}, version {version}: {failures[rank]}")
            elif not failures:
                self.clear(member)
        if 0 in failures:
            log.warning("version %d, attempt %d: %s", version, publication.attempt, failures[0])
            self.last["learner"] = failures[0]

    def settle(self) -> None:
        """All has gone well: what went wrong for others than those still struck is not to be told as a cause later."""
        struck = {member_id for member_id, _ in self.counts}
        self.last = {member_id: error for member_id, error in self.last.items() if member_id in struck}

    def keep(self, members: Sequence[Member]) -> None:
        """Forgets the strikes of processes that are not among these: whoever was gone and comes back is a newcomer."""
        there = {key(member) for member in members}
        self.counts = {one: times for one, times in self.counts.items() if one in there}
        self.resting = {one: end for one, end in self.resting.items() if one in there}

    def rest(self, member: Member, until: float, *, fetching: float = math.inf) -> None:
        """It was silent: up to this time, or until it holds version ``fetching``, it is not to hold up the others."""
        self.resting[key(member)] = until, fetching

    def _rests(self, member: Member, now: float) -> bool:
        until, fetching = self.resting.get(key(member), (now, math.inf))
        return until > now and member.policy_version < fetching

    def candidates(self, members: Sequence[Member]) -> list[Member]:
        """Live generators but those left out."""
        return [member for member in live(members) if not self.out(member)]

    def awake(self, members: Sequence[Member], now: float) -> list[Member]:
        """The candidates that do not rest; all of them if they all do, since there is nobody to hold up."""
        candidates = self.candidates(members)
        return [member for member in candidates if not self._rests(member, now)] or candidates

    def out(self, member: Member) -> bool:
        """Whether the member is left out."""
        return self.counts.get(key(member), 0) >= STRIKES

    def text(self) -> str:
        """The last error of each member that failed, for the error that ends the run."""
        return "; ".join(f"{member_id}: {error}" for member_id, error in sorted(self.last.items()))


class Solitude:
    """Says once that there is nobody to send to, and once that there is again; ends what has lasted too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._alone = limit_s, False

    def tell(self, blame: Blame, members: Sequence[Member], version: int, *, first: bool) -> None:
        """``first``: no version has been taken yet, and generators may still be starting."""
        alone = not blame.candidates(members)
        if alone and not self._alone:
            log.log(
                logging.INFO if first else logging.WARNING,
                "version %d waits for a generator, up to weights_sync.no_generator_timeout_s = %g; %s",
                version, self._limit_s, blame.text() or "none is alive",
            )  # fmt: skip
        elif self._alone and not alone:
            log.info("version %d waits no longer: there is a generator to take it", version)
        self._alone = alone

    def end(self, blame: Blame, version: int, *, since: float) -> None:
        """Raises NoReceiver where nobody has taken a version since a moment that is too long ago."""
        if time.monotonic() - since > self._limit_s:
            raise NoReceiver(
                f"no generator took version {version} for weights_sync.no_generator_timeout_s = {self._limit_s:g} s; "
                f"{blame.text() or 'none is alive'}"
            )


class MemberWatch:
    """Long-polls the broker's state in a thread of its own. Ends with the first error, which it hands on.

    Waits in ``Broker.state``; woken by a change of membership or, at the latest, after one poll.
    """

    def __init__(
        self,
        connect: Callable[[], Broker],
        *,
        on_members: Callable[[tuple[Member, ...]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._connect, self._on_members, self._on_error = connect, on_members, on_error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="member-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended; at most one poll."""
        self._closed.set()
        self._thread.join(timeout=2 * _POLL_S)

    def _run(self) -> None:
        try:
            broker = self._connect()
            revision = -1
            while not self._closed.is_set():
                state = broker.state(after_revision=revision, wait_s=_POLL_S)
                revision = state.revision
                self._on_members(state.members)
            broker.close()
        except BaseException as error:
            self._on_error(error)
