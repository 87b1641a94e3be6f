"""What the broker knows a training by: its name, and the numbers of its incarnations, over every restart."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "lineage.json"


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """``run``: the same in every restart that goes on with it. ``incarnation``: the last one, -1 before the first."""

    run: str
    incarnation: int


def take_up(run_dir: Path, resume: str) -> Lineage:
    """The lineage in a run's folder as it was before this start, which is counted there already.

    Counted before it is used: a start that dies half-way may waste a number, and no number is ever used twice, not even
    when the broker has forgotten the last one. ``learner.checkpoint.resume: never`` begins another run.
    """
    kept = read(run_dir)
    name = kept.run if kept and resume != "never" else uuid.uuid4().hex
    before = Lineage(run=name, incarnation=kept.incarnation if kept else -1)
    keep(run_dir, Lineage(run=name, incarnation=before.incarnation + 1))
    return before


def read(run_dir: Path) -> Lineage | None:
    """The lineage in a run's folder, unless no learner has started there yet."""
    path = run_dir / FILE
    return Lineage(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def keep(run_dir: Path, lineage: Lineage) -> None:
    """Writes it, whole or not at all."""
    path = run_dir / FILE
    part = path.with_suffix(".new")
    with part.open("w", encoding="utf-8") as file:
        json.dump(asdict(lineage), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
