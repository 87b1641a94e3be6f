"""From the rewards of a group to the advantage of each of its completions. n: completions of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Advantage = Callable[[Sequence[float]], NDArray[np.float64]]


def grpo(rewards: Sequence[float]) -> NDArray[np.float64]:
    """[n] (R - mean) / (std + 1e-6) of GRPO (arXiv 2402.03300, section 4.1.2).

    The paper leaves the kind of deviation open. This is the sample deviation (n - 1), as in TRL and verl, so that
    their learning rates carry over. Equal rewards, one reward included, give exactly 0 (C91).
    """
    centred = dr_grpo(rewards)
    deviation = float(centred.std(ddof=1)) if centred.any() else 0.0
    return np.asarray(centred / (deviation + 1e-6), np.float64)


def dr_grpo(rewards: Sequence[float]) -> NDArray[np.float64]:
    """[n] R - mean, without the division that favours groups of equal rewards (Dr. GRPO, arXiv 2503.20783)."""
    values: NDArray[np.float64] = np.asarray(rewards, np.float64)
    if zero_variance(rewards):
        return np.zeros_like(values)  # the mean of n equal floats may differ from them in the last bit
    return np.asarray(values - values.mean(), np.float64)


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether a group has nothing to tell: all its rewards are equal."""
    return len(set(rewards)) <= 1


ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo}
