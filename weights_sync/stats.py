"""What the publisher tells about its work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from broker.messages import Publication


@dataclass(frozen=True, kw_only=True)
class PublishStats:
    """Numbers of the publisher, of the last version that was taken.

    Attributes:
        seconds: from the announcement to the last receiver's report.
        payload_bytes, wire_bytes: of the version whole, and of what was sent of it to each receiver.
    """

    version: int = -1
    seconds: float = 0.0
    payload_bytes: int = 0
    wire_bytes: int = 0
    attempts: int = 0
    failed_attempts: int = 0

    def failed(self, publication: Publication) -> PublishStats:
        """After an attempt that failed for anyone."""
        return replace(self, attempts=publication.attempt, failed_attempts=self.failed_attempts + 1)

    def taken(self, publication: Publication, sizes: Iterable[tuple[int, int]], seconds: float) -> PublishStats:
        """After one that did not. ``sizes``: of each part, its bytes on the wire and whole."""
        wire, whole = (sum(part) for part in zip(*sizes, strict=True))
        return replace(
            self, attempts=publication.attempt, version=publication.version, seconds=seconds, payload_bytes=whole,
            wire_bytes=wire,
        )  # fmt: skip
