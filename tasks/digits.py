"""A task that a tiny model learns in minutes: turn a row of digits into another row, character by character.

``407>`` asks for ``704`` under ``kind: reverse``. The reward is exact, needs no judge, and grows with every right
character, so that a policy that starts from noise has something to climb.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tasks.loading import TaskError
from tasks.prompts import Item

Option = str | int | float | bool

ANSWERS: dict[str, Callable[[str], str]] = {
    "reverse": lambda digits: digits[::-1],
    "copy": lambda digits: digits,
    "successor": lambda digits: "".join(str((int(d) + 1) % 10) for d in digits),
    "sort": lambda digits: "".join(sorted(digits)),
}


def prompts(split: str, seed: int, options: Mapping[str, Option]) -> list[Item]:
    """Rows of ``digits`` digits (default 3); training and evaluation share none of them.

    Options: ``kind`` (a key of ``ANSWERS``), ``digits``, ``alphabet`` (how many different digits), ``size`` (items of
    the training set at most).
    """
    kind, width = str(options.get("kind", "reverse")), int(options.get("digits", 3))
    alphabet, size = int(options.get("alphabet", 10)), int(options.get("size", 4096))
    if kind not in ANSWERS:
        raise TaskError(f"task.options.kind: {kind!r} is none of {', '.join(ANSWERS)}")
    if width < 1 or not 2 <= alphabet <= 10 or size < 1:
        raise TaskError("task.options: digits and size are at least 1, alphabet is 2 to 10")
    rows = _rows(width, alphabet, random.Random(seed), most=size + max(1, size // 8))
    held_out = max(1, len(rows) // 9)
    chosen = rows[:held_out] if split == "eval" else rows[held_out:]
    return [Item(text=f"{row}>", reference=ANSWERS[kind](row)) for row in chosen]


def _rows(width: int, alphabet: int, rng: random.Random, *, most: int) -> list[str]:
    """Up to ``most`` different rows in random order."""
    numbers = rng.sample(range(alphabet**width), min(most, alphabet**width))
    return [_digits(number, width, alphabet) for number in numbers]


def _digits(number: int, width: int, alphabet: int) -> str:
    places = [(number // alphabet**i) % alphabet for i in range(width)]
    return "".join(str(place) for place in places)


def reward(text: str, answer: str, reference: str) -> float:
    """Share of right characters at right places, the stop after the last one included; 0 to 1."""
    right = sum(a == b for a, b in zip(answer, reference, strict=False))
    return (right + (len(answer) == len(reference))) / (len(reference) + 1)
