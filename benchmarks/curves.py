"""When a run has learned: its mean reward over ten steps, and the first step at which that is 0.8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

ENOUGH = 0.8
_WINDOW = 10  # steps


def numbers(lines: Sequence[Mapping[str, object]], name: str) -> list[float]:
    """One metric of all steps."""
    return [float(str(line[name])) for line in lines]


def steps_to_enough(rewards: Sequence[float]) -> int | None:
    """The first step whose last ten have a mean reward of 0.8; None: never."""
    return next((end for end, mean in _means(rewards).items() if mean >= ENOUGH), None)


def final_reward(rewards: Sequence[float]) -> float:
    """Of the last ten steps."""
    return _means(rewards)[len(rewards)]


def _means(rewards: Sequence[float]) -> dict[int, float]:
    ends = range(min(_WINDOW, len(rewards)), len(rewards) + 1)
    return {end: fmean(rewards[max(0, end - _WINDOW) : end]) for end in ends}
