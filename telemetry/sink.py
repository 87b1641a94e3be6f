"""Append-only JSON lines: one writer, one line a step, readable at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


class JsonlSink:
    """Writes each record as one line and flushes it. The step column never repeats after a resume (C106)."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one record; it is in the file when this returns. NaN and infinity become null: strict JSON."""
        self._file.write(json.dumps(_finite(dict(record)), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Keeps the records with ``step`` up to the given one; for a learner that goes on from a checkpoint.

        A line cut off by a crash goes too. The file is replaced whole, so a reader sees the old one or the new one.
        """
        kept = [record for record in read_jsonl(self._path) if _number(record.get("step")) <= step]
        draft = self._path.with_suffix(".tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        draft.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """The complete records of a file; none if it is not there. A last line without its end is not complete."""
    if not path.is_file():
        return []
    # Not splitlines(): it also splits at U+2028, which JSON allows inside a text.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("-inf")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
