"""The quickstart's task: go on counting. ``567`` asks for ``8901``.

The reward is exact, needs no judge, and grows with every right digit, so that a policy that starts from noise has
something to climb. Chance is one in the vocabulary's size for each digit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from tasks.loading import TaskError
from tasks.prompts import Item

Option = str | int | float | bool


def prompts(split: str, seed: int, options: Mapping[str, Option]) -> list[Item]:
    """Every run of 1 to ``longest`` (default 3) digits in counting order; a fifth of them is held out for evaluation.

    Options: ``longest``; ``digits``, how many are asked for (default 4), which has to be
    ``rollout.max_response_length``, as an answer goes on until it is cut off.
    """
    longest, asked = int(options.get("longest", 3)), int(options.get("digits", 4))
    if longest < 1 or asked < 1:
        raise TaskError("task.options: longest and digits are at least 1")
    items = [
        Item(text=_count(start, length), reference=_count(start + length, asked))
        for start in range(10)
        for length in range(1, longest + 1)
    ]
    random.Random(seed).shuffle(items)
    held_out = max(1, len(items) // 5)
    return items[:held_out] if split == "eval" else items[held_out:]


def _count(start: int, length: int) -> str:
    return "".join(str((start + i) % 10) for i in range(length))


def reward(text: str, answer: str, reference: str) -> float:
    """Share of right digits at right places; 0 to 1."""
    right = sum(given == wanted for given, wanted in zip(answer, reference, strict=False))
    return right / max(len(reference), len(answer))
