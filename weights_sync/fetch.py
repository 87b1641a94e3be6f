"""The receiving end of a depot: reads what the learner has left, at its own pace, and needs nothing else of it.

How an attempt ended goes to the learner with the member's report, which names the attempt (``weights_sync.answers``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from weights_sync.answers import answer
from weights_sync.config import WeightsSyncConfig
from weights_sync.depot import Connect, folder_at, open_depot
from weights_sync.parcel import get_part
from weights_sync.reception import ReceivePart, Reception


class Fetch:
    """weights_sync.reception.Source. A client of the broker belongs to one thread, so each attempt opens its own."""

    def __init__(self, config: WeightsSyncConfig, connect: Connect | None) -> None:
        self._config, self._connect = config, connect

    @contextmanager
    def opened(self, attempt: Reception) -> Iterator[ReceivePart]:
        """See weights_sync.reception.Source."""
        config, publication = self._config, attempt.publication
        depot = open_depot(config, self._connect, folder_at(publication.store, config.transport))
        try:
            yield lambda part, room: get_part(depot, config, publication, part, room, moved=attempt.moved)
        finally:
            depot.close()

    def watch(self, attempt: Reception) -> str:
        """See weights_sync.reception.Source. Every read has ``sync_timeout_s``."""
        timeout_s = self._config.sync_timeout_s
        while not attempt.ended.wait(max(0.01, min(timeout_s, attempt.moved_at + timeout_s - time.monotonic()))):
            if time.monotonic() - attempt.moved_at > timeout_s:
                return f"nothing came for weights_sync.sync_timeout_s = {timeout_s:g}"
        return ""

    def settled(self, attempt: Reception, error: str) -> str:
        """See weights_sync.reception.Source."""
        return answer(attempt.publication.attempt, error) if error else ""

    def leave(self, attempt: Reception) -> None:
        """See weights_sync.reception.Source. A read under way ends by itself."""
