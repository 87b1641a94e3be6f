"""The depot as blobs in the broker, for generators that reach nothing else of the learner.

``broker.max_blob_bytes`` bounds what lies there. A broker that was started again has lost it: whoever was about to
fetch a version says so, and it is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from broker.contract import Broker
from broker.errors import BrokerError, Refused
from weights_sync.errors import NO_ROOM, NoRoom, SyncFailed

T = TypeVar("T")


class Relay:
    """weights_sync.depot.Depot over a broker client of its own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def capacity(self) -> tuple[int, str]:
        """See weights_sync.depot.Depot."""
        return self._broker.max_blob_bytes, f"broker.max_blob_bytes = {self._broker.max_blob_bytes}"

    def put(self, name: str, data: Any) -> None:
        """See weights_sync.depot.Depot. One copy, since the client may send it after the buffer has changed."""
        _told(lambda: self._broker.put_blob(name, bytes(data)))

    def read(self, name: str) -> bytes:
        """See weights_sync.depot.Depot."""
        found = _told(lambda: self._broker.get_blob(name))
        if found is None:
            raise SyncFailed(f"the broker has no blob {name}: it was given up, or the broker was started again")
        return found

    def read_into(self, name: str, room: memoryview) -> None:
        """See weights_sync.depot.Depot."""
        found = memoryview(self.read(name))
        if len(found) != len(room):
            raise SyncFailed(f"blob {name} has {len(found)} bytes where {len(room)} were announced")
        room[:] = found

    def sweep(self, keep: Sequence[str]) -> None:
        """See weights_sync.depot.Depot."""
        _told(lambda: self._broker.sweep_blobs(keep=[f"{folder}/" for folder in keep]))

    def close(self) -> None:
        """See weights_sync.depot.Depot."""
        self._broker.close()


def _told(call: Callable[[], T]) -> T:
    try:
        return call()
    except Refused as error:
        raise NoRoom(f"{NO_ROOM}: weights_sync.transport = relay: {error}") from error
    except BrokerError as error:
        raise SyncFailed(f"weights_sync.transport = relay: {error}") from error
