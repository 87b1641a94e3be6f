"""Blobs in the broker: named bytes that one side leaves for others, bounded, in memory, and no part of the books.

    put -> get, as often as wanted -> drop          lua/blobs.lua is the same for Redis

They are for weights on their way to generators that reach nothing but the broker (weights_sync/relay.py). A broker that
is started again has none of them, whatever ``broker.durability`` says, unless it is a Redis that keeps everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.errors import Refused


class Blobs:
    """By name. ``size``: bytes in all."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self.size = 0

    def put(self, name: str, data: bytes, *, max_bytes: int) -> None:
        """Keeps ``data`` under ``name``, in place of what was there. Raises Refused where that makes too many bytes."""
        size = self.size + len(data) - len(self._held.get(name, b""))
        if size > max_bytes:
            raise Refused(too_many(name, size, max_bytes))
        self._held[name], self.size = data, size

    def get(self, name: str) -> bytes | None:
        """What is kept under ``name``, if anything is."""
        return self._held.get(name)

    def sweep(self, keep: Sequence[str]) -> int:
        """Forgets every blob whose name begins with none of ``keep``, and returns how many those were."""
        gone = [name for name in self._held if not name.startswith(tuple(keep))]
        for name in gone:
            self.size -= len(self._held.pop(name))
        return len(gone)


def too_many(name: str, size: int, max_bytes: int) -> str:
    """Why a blob is refused."""
    return f"blob {name} would make {size} bytes of blobs, over broker.max_blob_bytes = {max_bytes}"
