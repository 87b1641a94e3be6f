"""From the rewards of a step's groups to the advantage of each completion.

An advantage takes the rewards of every group, [n] each in the order of its completions, and gives as many numbers back.
Legend: n completions of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Advantage = Callable[[Sequence[Values]], list[Values]]

_EPS = 1e-6


def grpo(groups: Sequence[Values]) -> list[Values]:
    """(R - mean) / (std + 1e-6) of the group (GRPO, arXiv 2402.03300, section 4.1.2).

    The paper leaves the kind of deviation open. This is the sample deviation (n - 1), as in TRL and verl, so that
    their learning rates carry over. Equal rewards, one reward included, give exactly 0 (C91).
    """
    return [centred / (_deviation(centred) + _EPS) for centred in dr_grpo(groups)]


def dr_grpo(groups: Sequence[Values]) -> list[Values]:
    """R - mean of the group, without the division, which favours groups of nearly equal rewards (arXiv 2503.20783)."""
    return [_centred(rewards) for rewards in groups]


def rloo(groups: Sequence[Values]) -> list[Values]:
    """R - mean of the others of the group, an unbiased baseline (RLOO, arXiv 2402.14740): n / (n - 1) (R - mean)."""
    return [_centred(rewards) * (len(rewards) / max(1, len(rewards) - 1)) for rewards in groups]


def reinforce_pp(groups: Sequence[Values]) -> list[Values]:
    """(R - mean) / (std + 1e-6) over all completions of the step (REINFORCE++, arXiv 2501.03262)."""
    return _split(_normalised(np.concatenate([*groups, np.empty(0)])), groups)


def reinforce_pp_baseline(groups: Sequence[Values]) -> list[Values]:
    """R - mean of the group, then normalised as in ``reinforce_pp`` (REINFORCE++-baseline, arXiv 2501.03262)."""
    return _split(_normalised(np.concatenate([*dr_grpo(groups), np.empty(0)])), groups)


def best_worst(groups: Sequence[Values]) -> list[Values]:
    """1 for the best of a group, -1 for its worst, the first of equals; 0 for the others, and where all are equal."""
    return [_ends(rewards) for rewards in groups]


def zero_variance(rewards: Sequence[float] | Values) -> bool:
    """Whether a group has nothing to tell: all its rewards are equal."""
    return len(set(np.asarray(rewards).tolist())) <= 1


def overlong_penalty(lengths: NDArray[np.int64], *, max_length: int, share: float, penalty: float) -> Values:
    """[n] what is taken from the reward of a completion of so many tokens: nothing up to (1 - ``share``)
    ``max_length``, then ever more, ``penalty`` at ``max_length`` (DAPO's soft overlong punishment, arXiv 2503.14476,
    equation 13, where ``penalty`` is 1).
    """
    buffer = share * max_length
    if buffer == 0:
        return np.zeros(len(lengths))
    return np.asarray(penalty * np.clip((lengths - (max_length - buffer)) / buffer, 0.0, 1.0), np.float64)


def _centred(rewards: Values) -> Values:
    if zero_variance(rewards):
        return np.zeros(len(rewards))  # the mean of n equal floats may differ from them in the last bit
    return np.asarray(rewards - rewards.mean(), np.float64)


def _deviation(centred: Values) -> float:
    return float(centred.std(ddof=1)) if centred.any() else 0.0


def _normalised(values: Values) -> Values:
    centred = _centred(values)
    return centred / (_deviation(centred) + _EPS)


def _split(values: Values, groups: Sequence[Values]) -> list[Values]:
    return np.split(values, np.cumsum([len(rewards) for rewards in groups])[:-1]) if groups else []


def _ends(rewards: Values) -> Values:
    values = np.zeros(len(rewards))
    if not zero_variance(rewards):
        values[rewards.argmax()], values[rewards.argmin()] = 1.0, -1.0
    return values


ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "best_worst": best_worst,
}
