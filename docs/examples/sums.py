"""An own task: add two digits. ``3+4=`` asks for ``7``."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.prompts import Item


def prompts(split: str, seed: int, options: Mapping[str, str | int | float | bool]) -> list[Item]:
    """All sums of two digits up to ``largest``; every fifth is held out, for evaluation."""
    digits = range(int(options.get("largest", 9)) + 1)
    pairs = [(a, b) for a in digits for b in digits]
    chosen = [pair for i, pair in enumerate(pairs) if (i % 5 == 0) == (split == "eval")]
    return [Item(text=f"{a}+{b}=", reference=str(a + b)) for a, b in chosen]


def right(text: str, answer: str, reference: str) -> float:
    """1 for the sum, 0 for anything else."""
    return float(answer == reference)


async def length(text: str, answer: str, reference: str) -> float:
    """1 for an answer as long as the sum. A coroutine, as one that asks a judge over the network would be."""
    return float(len(answer) == len(reference))
