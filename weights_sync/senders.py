"""What rank 0 knows of the learner ranks that send: who does not send must not pass for receivers that do not take.

A receiver that waits for a part in vain loses the attempt by the same error as one whose peer was killed. So the other
ranks count on in the store all the time (``beat``) and say when a part is sealed (``ready``); and receivers say when
they have come for a part (``here``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from weights_sync.control import FATAL, Attempt, Control, is_sent

_MISSED_BEATS = 3  # of a rank that is only busy


def beat_s(timeout_s: float) -> float:
    """Seconds between two beats of a learner rank, for this ``weights_sync.sync_timeout_s``."""
    return min(1.0, timeout_s / 4)


@dataclass(kw_only=True)
class _Sign:
    """Of life: the last beat, when it was new, and the longest time in this attempt without a new one."""

    beat: str
    at: float
    longest_s: float = 0.0


class Senders:
    """For the publisher's own thread: ``begin``, then ``look`` again and again until the attempt's parts are sent."""

    def __init__(self, control: Control, *, parts: int, timeout_s: float) -> None:
        self._control, self._parts, self._timeout_s = control, parts, timeout_s
        self._patience_s = max(_MISSED_BEATS * beat_s(timeout_s), timeout_s / 2)
        self._signs: dict[int, _Sign] = {}  # by part; rank 0's own are its looks
        self._turn, self._turn_at = 0, 0.0  # the first part that is not sent, and since when it has been
        self.said: dict[int, str] = {}

    def begin(self) -> None:
        """An attempt begins; nobody has been silent in it yet."""
        now = time.monotonic()
        self._turn, self._turn_at, self.said = 0, now, {}
        self._signs = {
            part: _Sign(beat=self._signs[part].beat if part in self._signs else "", at=now)
            for part in range(self._parts)
        }

    def look(self, attempt: Attempt) -> None:
        """Notes what the other ranks have said of their parts, and who has given a sign since the last look."""
        now, beats = time.monotonic(), {0: "", **self._control.beats()}
        self.said = self._control.sent(attempt.publication.attempt)
        for part, sign in self._signs.items():
            sign.longest_s = max(sign.longest_s, now - sign.at)
            if part == 0 or beats.get(part, "") != sign.beat:
                sign.beat, sign.at = beats.get(part, ""), now
        turn = next(self._owing(), 0) if attempt.sent else 0
        if turn != self._turn:
            self._turn, self._turn_at = turn, now

    @property
    def all_sent(self) -> bool:
        """Whether every other rank has sent its part."""
        return not any(self._owing())

    def refused(self) -> str:
        """What another rank says that no other attempt can mend."""
        return next((text.removeprefix(FATAL) for text in self.said.values() if text.startswith(FATAL)), "")

    def lost(self) -> str:
        """Why other ranks could not send, or which of them has been silent for too long; empty if all is well."""
        told = [f"learner rank {part}: {text}" for part, text in self.said.items() if not is_sent(text)]
        now = time.monotonic()
        return "; ".join(told) or self._silent([p for p in self._owing() if now - self._signs[p].at > self._timeout_s])

    def unheard(self, since: float) -> bool:
        """Whether one that still has to send has given no sign since then, but may be about to."""
        now = time.monotonic()
        return any(self._signs[p].at < since and now - self._signs[p].at < self._patience_s for p in self._owing())

    def fault(self, attempt: Attempt, *, since: float) -> str:
        """Which learner rank it was that held up an attempt which failed for receivers then; empty: none."""
        if (stood_s := self._signs[0].longest_s) > self._patience_s:
            return f"learner rank 0 itself stood still for {stood_s:.1f} s"
        silent = [p for p in self._owing() if self._signs[p].at < since or self._signs[p].longest_s > self._patience_s]
        if silent or not self._turn or not self._waited(since):
            return self._silent(silent)
        ready = self._control.ready(attempt.publication.attempt, self._turn)
        return "" if ready else f"learner rank {self._turn} has not sealed its part in time {self._deadline}"

    def missing(self, attempt: Attempt, *, since: float) -> list[int]:
        """The receivers that let those wait which had come for the part whose turn it was, until these gave up."""
        ranks = attempt.rank_numbers
        came = self._control.came(attempt.publication.attempt, self._turn, ranks)
        return [rank for rank in ranks if rank not in came] if came and self._waited(since) else []

    @property
    def _deadline(self) -> str:
        return f"(deadline: weights_sync.sync_timeout_s = {self._timeout_s:g})"

    def _owing(self) -> Iterator[int]:
        return (part for part in range(1, self._parts) if not is_sent(self.said.get(part, "")))

    def _waited(self, until: float) -> bool:
        return until - self._turn_at > 0.9 * self._timeout_s

    def _silent(self, parts: list[int]) -> str:
        who = f"learner rank {', '.join(map(str, parts))}"
        return f"{who} gives no sign of life: stopped, hung or gone {self._deadline}" if parts else ""
