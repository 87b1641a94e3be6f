"""Where a version waits to be fetched: named blobs that the learner leaves and generators read (disk.py, relay.py).

    <run>/<incarnation>/<attempt>/<part>.<i>          bucket i of what one learner rank sends
    <run>/<incarnation>/<attempt>/<part>.manifest     put last: with it the part is there

Every name holds run, incarnation and attempt, so nothing that is left of another one is ever read in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from broker.contract import Broker
from weights_sync.config import WeightsSyncConfig
from weights_sync.disk import Disk
from weights_sync.errors import SyncFailed
from weights_sync.relay import Relay

_RUN = re.compile(r"[\w.+=,@-]+")


class Depot(Protocol):
    """For one thread. Every method raises SyncFailed that names the setting to change."""

    def capacity(self) -> tuple[int, str]:
        """How many bytes can ever lie there, and what bounds them."""

    def put(self, name: str, data: Any) -> None:
        """Leaves ``data`` (a buffer of bytes) under a name, whole or not at all, in place of what was there.

        Raises NoRoom where something else would have to go first.
        """

    def read(self, name: str) -> bytes:
        """All of a blob."""

    def read_into(self, name: str, room: memoryview) -> None:
        """A blob of just as many bytes as ``room`` has."""

    def sweep(self, keep: Sequence[str]) -> None:
        """Forgets all of the run but what is under these folders."""

    def close(self) -> None:
        """Ends its connection, if it has one."""


Connect = Callable[[], Broker]


def open_depot(config: WeightsSyncConfig, connect: Connect | None, folder: str) -> Depot:
    """The depot that the settings name, at either end. Raises SyncFailed when it cannot be used.

    ``connect``: opens a broker client, for the relay. ``folder``: of an incarnation, as ``folder_at`` gives it.
    """
    if config.transport == "disk":
        return Disk(Path(config.dir), folder.partition("/")[0])
    if connect is None:
        raise SyncFailed("weights_sync.transport = relay needs a broker, and none was given")
    return Relay(connect())


def address(config: WeightsSyncConfig, run: str, incarnation: int) -> str:
    """Where an incarnation's versions are, for ``Publication.store``: ``<transport>:<run>/<incarnation>``."""
    return f"{config.transport}:{re.sub(r'[^A-Za-z0-9_.+=,@-]', '_', run).lstrip('.') or 'run'}/{incarnation}"


def check_transport(store: str, transport: str) -> None:
    """Raises SyncFailed when a publication's ``store`` is of another transport than this side's."""
    named = store.partition(":")[0]
    announced = named if named in ("disk", "relay") else "collective"
    if announced != transport:
        raise SyncFailed(
            f"the learner sends by {announced}, this generator receives by {transport}: give both the same "
            "weights_sync.transport"
        )


def folder_at(store: str, transport: str) -> str:
    """The incarnation's folder that a publication names. Raises SyncFailed when it is of another transport."""
    check_transport(store, transport)
    folder = store.partition(":")[2]
    run, _, incarnation = folder.partition("/")
    if not _RUN.fullmatch(run) or run.startswith(".") or not incarnation.isdigit():
        raise SyncFailed(f"no place for weights: {store!r}")
    return folder
