"""One micro-batch's share of the step's loss: the chosen loss of every token, corrected, averaged, with its bonuses.

    log-probabilities ─loss─► token losses ─correction─► weighed ─loss_mean─► a sum over rows and tokens

Legend: B rows, T positions. Three policies: behavior (the generator's, which sampled), proximal (what the clip holds on
to), current.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from broker.errors import SlipstreamError
from learners.config import AlgorithmConfig
from learners.corrections import CORRECTIONS, Correction
from learners.kl import ESTIMATORS, k1, k3
from learners.losses import LOSSES, Loss, PolicyRows
from learners.ratios import exp, row_sum
from tasks.loading import load_function

Function = TypeVar("Function")


class WrongShape(SlipstreamError):
    """A loss or a correction has returned something else than the tensors that it should."""


class LossTerms(NamedTuple):
    """Sums over the loss tokens of one micro-batch. ``loss`` carries the gradient and is this part of the step's mean.

    ``ratio`` and ``ratio_squared`` are of the learner's policy to the behavior policy, before any bound; ``ratio_max``
    and ``sequence_ratio_max`` the largest of a token and of a completion. ``clipped``: tokens whose ratio the loss or
    the correction holds; ``rejected``: tokens whose correction weight is 0. ``kl_k1``, ``kl_k3``: of KL(behavior,
    current); ``kl_reference``: of KL(current, reference) by ``kl_estimator``, 0 without a reference.
    """

    loss: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    sequence_ratio_max: Tensor
    clipped: Tensor
    rejected: Tensor
    kl_k1: Tensor
    kl_k3: Tensor
    kl_reference: Tensor
    entropy: Tensor


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss and the correction that a configuration names."""

    algorithm: AlgorithmConfig
    loss: Loss
    correction: Correction

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Objective:
        """Raises TaskError for a function of the user's that is not there."""
        return cls(
            algorithm=algorithm,
            loss=chosen(LOSSES, algorithm.loss, "algorithm.loss"),
            correction=chosen(CORRECTIONS, algorithm.correction.kind, "algorithm.correction.kind"),
        )


def chosen(known: Mapping[str, Function], name: str, setting: str) -> Function:
    """The function that a setting names: one of ours, or the user's. Raises TaskError."""
    return known[name] if name in known else load_function(name, setting=setting)  # type: ignore[return-value]


def policy_loss(
    objective: Objective,
    *,
    logp_BT: Tensor,
    proximal_logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    advantage_BT: Tensor,
    weight_B: Tensor,
    mask_BT: Tensor,
    entropy_BT: Tensor,
    reference_logp_BT: Tensor | None = None,
) -> LossTerms:
    """The sum over rows of ``weight_B`` times the sum over their tokens of correction · loss - entropy + KL.

    ``weight_B`` is of the whole step (learners/loss_means.py): the gradient depends on neither micro-batches nor ranks
    (C95). ``advantage_BT``: or [B, 1], of the whole completion. ``reference_logp_BT``: with it, ``algorithm.kl_coef``
    times the KL estimate is added where ``kl_in`` is ``loss``. Raises WrongShape.
    """
    algorithm, mask_BT = objective.algorithm, mask_BT.bool()

    def at_loss_tokens(values_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, values_BT, 0.0)  # before any exp: 0 * inf would be NaN (C94)

    logp_BT, behavior_BT = at_loss_tokens(logp_BT), at_loss_tokens(behavior_logp_BT)
    proximal_BT = at_loss_tokens(proximal_logp_BT).detach()
    old_BT = behavior_BT if algorithm.correction.kind == "none" else proximal_BT
    rows = PolicyRows(logp_BT, old_BT, behavior_BT, advantage_BT.expand_as(logp_BT), mask_BT)
    loss_BT, cut_BT = _checked(objective.loss(rows, algorithm), logp_BT, "algorithm.loss", algorithm.loss)
    correction = objective.correction(proximal_BT - behavior_BT, mask_BT, algorithm.correction)
    kind = algorithm.correction.kind
    correction_BT, far_BT = _checked(correction, logp_BT, "algorithm.correction.kind", kind)
    token_BT = correction_BT.detach() * loss_BT - algorithm.entropy_coef * entropy_BT
    kl_reference = logp_BT.new_zeros(())
    if reference_logp_BT is not None:
        kl_BT = ESTIMATORS[algorithm.kl_estimator](at_loss_tokens(reference_logp_BT).detach() - logp_BT)
        kl_reference = at_loss_tokens(kl_BT.detach()).sum()
        token_BT = token_BT + algorithm.kl_coef * kl_BT if algorithm.kl_in == "loss" else token_BT
    log_ratio_BT = logp_BT.detach() - behavior_BT
    ratio_BT = at_loss_tokens(exp(log_ratio_BT))
    return LossTerms(
        loss=(weight_B * at_loss_tokens(token_BT).sum(-1)).sum(),
        ratio=ratio_BT.sum(),
        ratio_squared=ratio_BT.square().sum(),
        ratio_max=ratio_BT.max(),
        sequence_ratio_max=torch.where(mask_BT.any(-1, keepdim=True), exp(row_sum(log_ratio_BT)), 0.0).max(),
        clipped=((cut_BT | far_BT) & mask_BT).sum(),
        rejected=((correction_BT == 0) & mask_BT).sum(),
        kl_k1=at_loss_tokens(k1(log_ratio_BT)).sum(),
        kl_k3=at_loss_tokens(k3(log_ratio_BT)).sum(),
        kl_reference=kl_reference,
        entropy=at_loss_tokens(entropy_BT.detach()).sum(),
    )


def _checked(returned: object, like_BT: Tensor, setting: str, name: str) -> tuple[Tensor, Tensor]:
    if isinstance(returned, tuple) and len(returned) == 2:
        values, cut = returned
        shapes = [tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in returned]
        if shapes == [tuple(like_BT.shape)] * 2 and cut.dtype is torch.bool:
            return values, cut
        found = f"{shapes[0]} and {shapes[1]}"
    else:
        found = type(returned).__name__
    raise WrongShape(
        f"{setting}={name}: expected two tensors of shape {tuple(like_BT.shape)}, the second of bool; got {found}"
    )
