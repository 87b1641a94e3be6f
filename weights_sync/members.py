"""Who receives: the publisher's view of the generators, and a thread that keeps it fresh."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker.contract import Broker
from broker.messages import Member, MemberState

STRIKES = 3  # failures in a row after which a receiver is left out until its process is replaced
_LIVE = (MemberState.SYNCING, MemberState.SERVING)
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


@dataclass(kw_only=True)
class Blame:
    """Failures in a row, per process; a success clears them."""

    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)

    def strike(self, member: Member, error: str, *, times: int = 1) -> None:
        """Counts a failure of this member."""
        self.counts[key(member)] = self.counts.get(key(member), 0) + times
        self.last[member.member_id] = error

    def clear(self, member: Member) -> None:
        """Forgets the failures of a member that has just taken a version."""
        self.counts.pop(key(member), None)
        self.last.pop(member.member_id, None)

    def out(self, member: Member) -> bool:
        """Whether the member is left out."""
        return self.counts.get(key(member), 0) >= STRIKES

    def text(self) -> str:
        """The last error of each member that failed, for the error that ends the run."""
        return "; ".join(f"{member_id}: {error}" for member_id, error in sorted(self.last.items()))


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
