"""New records of a JSON-lines file that somebody else is writing."""

from __future__ import annotations

import json
from pathlib import Path


class Tail:
    """Follows one file from its start; a file that was replaced (a learner went on from a checkpoint) starts over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._rest = b""

    def read(self) -> list[dict[str, object]]:
        """Complete records since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            inode = self._path.stat().st_ino
            if inode != self._inode:
                self._inode, self._offset, self._rest = inode, 0, b""
            file.seek(self._offset)
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        return [json.loads(line) for line in lines if line]
