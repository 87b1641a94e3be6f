"""What the fake learner has trained: its only weights, kept in every checkpoint, and judged at the end of a drill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from broker.messages import Batch, Frontier
from learners.checkpoint import Checkpoints, read_checkpoint

FILE = "history.json"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch: what made policy ``version``."""

    life: int
    incarnation: int
    version: int
    trained: list[int]
    ended: list[tuple[int, str, str]]  # position, state, reason


@dataclass(kw_only=True)
class History:
    """The surviving lineage: a step undone by going back to an earlier checkpoint is not in it.

    ``lives``: (number, version it started from) of the learner's starts that this lineage went through.
    """

    steps: list[Step] = field(default_factory=list)
    lives: list[tuple[int, int]] = field(default_factory=list)

    def add(self, batch: Batch, version: int) -> None:
        """The batch has become part of ``version``."""
        step = Step(
            life=self.lives[-1][0],
            incarnation=batch.incarnation,
            version=version,
            trained=[group.prompt.position for group in batch.groups],
            ended=[(one.position, one.state, one.reason) for one in batch.ended],
        )
        self.steps.append(step)

    def maker(self, version: int) -> int:
        """The life that made policy ``version`` of this lineage, by which a given-up policy is told from it."""
        return self.steps[version - 1].life if 0 < version <= len(self.steps) else 0

    def write(self, directory: Path) -> None:
        """For learners.checkpoint.Checkpoints.save."""
        (directory / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def newest(checkpoints: Checkpoints) -> tuple[int, Frontier, History]:
    """Version, data position and lineage of the newest complete checkpoint; of nothing trained if there is none."""
    path = checkpoints.newest()
    if path is None:
        return 0, Frontier(), History()
    version, frontier = read_checkpoint(path)
    known = json.loads((path / FILE).read_text(encoding="utf-8"))
    steps = [Step(**{**step, "ended": [tuple(one) for one in step["ended"]]}) for step in known["steps"]]
    return version, frontier, History(steps=steps, lives=[(life, started) for life, started in known["lives"]])
