"""What a generator tells about itself with every heartbeat."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import psutil

from broker.messages import Group

WINDOW_S = 30.0


class Rates:
    """Counters, and tokens a second over the last ``WINDOW_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._counts = dict.fromkeys(("groups", "groups_refused", "groups_failed", "failed_completions"), 0)

    def pushed(self, group: Group, *, accepted: bool) -> None:
        """A group was delivered; ``accepted`` is false for duplicates and abandoned ones."""
        self._counts["groups" if accepted else "groups_refused"] += 1
        self._counts["failed_completions"] += group.failed_completions
        self._recent.append((self._clock(), sum(len(c.token_ids) for c in group.completions)))
        self._forget()

    def group_failed(self) -> None:
        """A group ended without an answer."""
        self._counts["groups_failed"] += 1

    def stats(self) -> dict[str, float]:
        """Small named numbers; ``tokens_per_s`` counts a group's tokens when it is delivered."""
        self._forget()
        span = max(1e-3, min(WINDOW_S, self._clock() - self._began))
        tokens = sum(count for _, count in self._recent)
        memory = float(psutil.Process().memory_info().rss)
        counts = {name: float(count) for name, count in self._counts.items()}
        return {"tokens_per_s": tokens / span, "rss_bytes": memory, **counts}

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < self._clock() - WINDOW_S:
            self._recent.popleft()
