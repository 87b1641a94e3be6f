"""The quickstart's task: go on counting. ``67`` asks for ``8901``.

The reward is exact, needs no judge, and grows with every right digit, so that a policy that starts from noise has
something to climb. Chance is one in the vocabulary's size for each digit.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.loading import TaskError
from tasks.prompts import Item

Option = str | int | float | bool


def prompts(split: str, seed: int, options: Mapping[str, Option]) -> list[Item]:
    """The ten runs of ``length`` (default 2) digits in counting order, for training and for evaluation alike.

    Options: ``length``; ``digits``, how many are asked for (default 4), which has to be
    ``rollout.max_response_length``, as an answer goes on until it is cut off.
    """
    length, asked = int(options.get("length", 2)), int(options.get("digits", 4))
    if length < 1 or asked < 1:
        raise TaskError("task.options: length and digits are at least 1")
    return [Item(text=_count(start, length), reference=_count(start + length, asked)) for start in range(10)]


def _count(start: int, length: int) -> str:
    return "".join(str((start + i) % 10) for i in range(length))


def reward(text: str, answer: str, reference: str) -> float:
    """Share of right digits at right places; 0 to 1."""
    right = sum(given == wanted for given, wanted in zip(answer, reference, strict=False))
    return right / max(len(reference), len(answer))
