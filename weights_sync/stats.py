"""What the publisher tells about its work."""

from __future__ import annotations

from dataclasses import dataclass


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
