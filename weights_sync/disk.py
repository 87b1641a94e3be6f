"""The depot as folders of a shared file system; generators need to read it only.

A file appears under its name by a rename, after its bytes are on the disk: a reader sees all of it or nothing. What the
learner must not delete yet is for its publisher to know (weights_sync/readers.py).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weights_sync.errors import NO_ROOM, NoRoom, SyncFailed

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """weights_sync.depot.Depot in ``weights_sync.dir``, which has to be there: it may be a mount that is missing."""

    def __init__(self, root: Path, run: str) -> None:
        self._root, self._run = root, run
        if not root.is_dir():
            raise SyncFailed(f"weights_sync.dir = {root} is no directory here: create it, or mount what is shared")

    def capacity(self) -> tuple[int, str]:
        """See weights_sync.depot.Depot."""
        total = shutil.disk_usage(self._root).total
        return total, f"the file system of weights_sync.dir = {self._root}, which has {total} bytes"

    def put(self, name: str, data: Any) -> None:
        """See weights_sync.depot.Depot."""
        path = self._root / name
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb", buffering=0) as file:
                left = memoryview(data).cast("B")
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._unusable("cannot be written", error) from error

    def read(self, name: str) -> bytes:
        """See weights_sync.depot.Depot."""
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            raise self._unusable("cannot be read", error) from error

    def read_into(self, name: str, room: memoryview) -> None:
        """See weights_sync.depot.Depot."""
        try:
            with (self._root / name).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != len(room):
                    raise SyncFailed(f"{self._root / name} has {size} bytes where {len(room)} were announced")
                left = room
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise self._unusable("cannot be read", error) from error
        if left:
            raise SyncFailed(f"{self._root / name} ends {len(left)} bytes too soon")

    def sweep(self, keep: Sequence[str]) -> None:
        """See weights_sync.depot.Depot. Folders of other runs are left alone."""
        wanted = {self._root / folder for folder in keep}
        for incarnation in self._folders(self._root / self._run):
            for attempt in self._folders(incarnation):
                if attempt not in wanted:
                    shutil.rmtree(attempt, ignore_errors=True)
            self._remove_if_empty(incarnation)
        self._remove_if_empty(self._root / self._run)

    def close(self) -> None:
        """See weights_sync.depot.Depot."""

    def _folders(self, path: Path) -> list[Path]:
        try:
            return [one for one in path.iterdir() if one.name.isdigit() and one.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable("cannot be read", error) from error

    def _remove_if_empty(self, path: Path) -> None:
        try:
            path.rmdir()
        except OSError:
            return  # not empty, or gone already

    def _unusable(self, what: str, error: OSError) -> SyncFailed:
        text = f"weights_sync.dir = {self._root} {what}: {error.strerror or error} ({error.filename or ''})"
        return NoRoom(f"{NO_ROOM}: {text}") if error.errno in _FULL else SyncFailed(text)
