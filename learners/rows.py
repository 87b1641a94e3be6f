"""From the groups of a batch to the rows that are trained: rewards shaped, advantages made, loss weights given.

groups ─overlong─► rewards ─advantage─► rows with a loss ─loss_mean─► TrainSequence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from broker.config import RolloutConfig
from broker.errors import SlipstreamError
from broker.messages import Batch, Completion, Group
from learners.advantages import ADVANTAGES, Values, overlong_penalty, zero_variance
from learners.batching import TrainSequence
from learners.config import AlgorithmConfig
from learners.loss_means import LOSS_MEANS
from learners.losses import PAIRED
from learners.objective import chosen


class WrongLength(SlipstreamError):
    """An advantage or a loss mean has not given one finite number for each completion."""


def trained_rows(
    batch: Batch, *, version: int, algorithm: AlgorithmConfig, rollout: RolloutConfig
) -> list[TrainSequence]:
    """The completions that have a token to train; those without still count in their group's baseline.

    Under a paired loss, of each group the best and the worst, in this order, if both have; else none of it. Raises
    WrongLength for a function of the user's that gives something else than numbers.
    """
    rewards = [shaped_rewards(group, algorithm, rollout) for group in batch.groups]
    advantage = chosen(ADVANTAGES, algorithm.advantage, "algorithm.advantage")
    values = advantage(rewards)
    setting = f"algorithm.advantage={algorithm.advantage}"
    _check(setting, [len(one) for one in values], [len(one) for one in rewards], np.concatenate([*values, [0.0]]))
    rows = [
        _row(group, completion, value, version)
        for group, mine, old in zip(batch.groups, values, rewards, strict=True)
        if algorithm.zero_variance_groups == "train" or not zero_variance(old)
        for completion, value in _chosen(group, mine, paired=algorithm.loss in PAIRED)
    ]
    tokens_N = np.array([row.loss_tokens for row in rows], np.int64)
    mean = chosen(LOSS_MEANS, algorithm.loss_mean, "algorithm.loss_mean")
    weights_N = mean(tokens_N, rollout.max_response_length)
    _check(f"algorithm.loss_mean={algorithm.loss_mean}", [len(weights_N)], [len(rows)], weights_N)
    return [replace(row, weight=float(weight)) for row, weight in zip(rows, weights_N, strict=True)]


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


def _chosen(group: Group, values: Values, *, paired: bool) -> Iterator[tuple[Completion, float]]:
    pairs = list(zip(group.completions, values.tolist(), strict=True))
    if paired:
        ends = [pair for sign in (1.0, -1.0) for pair in pairs if pair[1] == sign]
        pairs = ends if all(completion.loss_mask.any() for completion, _ in ends) else []
    yield from ((completion, value) for completion, value in pairs if completion.loss_mask.any())


def _row(group: Group, completion: Completion, advantage: float, version: int) -> TrainSequence:
    return TrainSequence(
        prompt_ids=group.prompt.token_ids,
        completion_ids=completion.token_ids,
        loss_mask=completion.loss_mask,
        behavior_logprobs=completion.behavior_logprobs,
        staleness=version - completion.versions(),
        advantage=advantage,
        weight=0.0,
    )


def _check(setting: str, found: Sequence[int], wanted: Sequence[int], values: Values) -> None:
    if found != wanted:
        raise WrongLength(f"{setting}: gave {found} numbers for {wanted} completions")
    if not np.isfinite(values).all():
        raise WrongLength(f"{setting}: gave a number that is not finite")
