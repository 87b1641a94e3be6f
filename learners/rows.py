"""From the groups of a batch to the rows that are trained: rewards shaped, advantages made, loss weights given.

    groups ─overlong─► rewards ─advantage─► rows with a loss ─shuffle─► mini-batches ─loss_mean─► TrainSequence

Legend: N completions of the batch, over all groups in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from broker.config import RolloutConfig
from broker.errors import SlipstreamError
from broker.messages import Batch, Group
from learners.advantages import ADVANTAGES, Values, overlong_penalty, zero_variance
from learners.batching import TrainSequence
from learners.config import AlgorithmConfig
from learners.loss_means import LOSS_MEANS
from learners.losses import PAIRED
from learners.objective import chosen
from learners.recipes import GAE


class WrongLength(SlipstreamError):
    """An advantage or a loss mean has not given one finite number for each completion."""


def trained_rows(
    batch: Batch, *, version: int, algorithm: AlgorithmConfig, rollout: RolloutConfig, seed: int = 0
) -> list[list[TrainSequence]]:
    """[mini-batch][row] the completions that have a token to train; the others still count in their group's baseline.

    Under a paired loss, of each group the best and the worst, in this order, if both have; else none of it. More than
    one mini-batch is drawn by groups, the same for the same ``seed`` and ``version``; none is empty unless all are.
    Raises WrongLength for a function of the user's that gives something else than numbers.
    """
    values = np.split(advantages(batch, algorithm=algorithm, rollout=rollout), _bounds(batch))
    groups = [
        [_row(group, place, value, index=start + place, version=version) for place, value in pairs]
        for group, start, mine in zip(batch.groups, [0, *_bounds(batch)], values, strict=False)
        if algorithm.zero_variance_groups == "train" or not zero_variance(shaped_rewards(group, algorithm, rollout))
        if (pairs := _chosen(group, mine, paired=algorithm.loss in PAIRED))
    ]
    count = max(1, min(algorithm.mini_batches, len(groups)))
    order = np.random.default_rng((seed, version)).permutation(len(groups)) if count > 1 else np.arange(len(groups))
    return [
        _weighted([row for i in part for row in groups[i]], algorithm, rollout) for part in np.array_split(order, count)
    ]


def advantages(
    batch: Batch, *, algorithm: AlgorithmConfig, rollout: RolloutConfig, kl_N: Values | None = None
) -> Values:
    """[N] the advantage of every completion; under ``gae`` its reward.

    ``kl_N``: ``kl_coef`` times it is taken off the rewards first (arXiv 2203.02155, equation 2: the sum over the
    completion). Raises WrongLength.
    """
    bounds = _bounds(batch)
    rewards = [shaped_rewards(group, algorithm, rollout) for group in batch.groups]
    if kl_N is not None:
        rewards = [mine - algorithm.kl_coef * kl for mine, kl in zip(rewards, np.split(kl_N, bounds), strict=False)]
    values = rewards
    if algorithm.advantage != GAE:
        values = chosen(ADVANTAGES, algorithm.advantage, "algorithm.advantage")(rewards)
    together: Values = np.concatenate([*values, np.empty(0)])
    setting = f"algorithm.advantage={algorithm.advantage}"
    _check(setting, [len(one) for one in values], [len(one) for one in rewards], together)
    return together


def _bounds(batch: Batch) -> list[int]:
    """Where each group but the first starts among the N completions."""
    return list(accumulate(len(group.completions) for group in batch.groups))[:-1]


def _weighted(rows: list[TrainSequence], algorithm: AlgorithmConfig, rollout: RolloutConfig) -> list[TrainSequence]:
    mean = chosen(LOSS_MEANS, algorithm.loss_mean, "algorithm.loss_mean")
    weights = mean(np.array([row.loss_tokens for row in rows], np.int64), rollout.max_response_length)
    _check(f"algorithm.loss_mean={algorithm.loss_mean}", [len(weights)], [len(rows)], weights)
    return [replace(row, weight=float(weight)) for row, weight in zip(rows, weights, strict=True)]


def shaped_rewards(group: Group, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Values:
    """[n] the rewards as they are compared: less what an overlong answer costs."""
    rewards = np.array([one.reward for one in group.completions], np.float64)
    lengths = np.array([len(one.token_ids) for one in group.completions], np.int64)
    return rewards - overlong_penalty(
        lengths,
        max_length=rollout.max_response_length,
        share=algorithm.overlong_share,
        penalty=algorithm.overlong_penalty,
    )


def _chosen(group: Group, values: Values, *, paired: bool) -> list[tuple[int, float]]:
    """(place in the group, advantage) of the completions that become rows."""
    trainable = [bool(one.loss_mask.any()) for one in group.completions]
    pairs = list(enumerate(values.tolist()))
    if paired:
        ends = [pair for sign in (1.0, -1.0) for pair in pairs if pair[1] == sign]
        pairs = ends if all(trainable[place] for place, _ in ends) else []
    return [(place, value) for place, value in pairs if trainable[place]]


def _row(group: Group, place: int, advantage: float, *, index: int, version: int) -> TrainSequence:
    completion = group.completions[place]
    return TrainSequence(
        prompt_ids=group.prompt.token_ids,
        completion_ids=completion.token_ids,
        loss_mask=completion.loss_mask,
        behavior_logprobs=completion.behavior_logprobs,
        staleness=version - completion.versions(),
        advantage=advantage,
        weight=0.0,
        index=index,
    )


def _check(setting: str, found: Sequence[int], wanted: Sequence[int], values: Values) -> None:
    if found != wanted:
        raise WrongLength(f"{setting}: gave {found} numbers for {wanted} completions")
    if not np.isfinite(values).all():
        raise WrongLength(f"{setting}: gave a number that is not finite")
