"""Off-policy corrections: the weight of each token's loss from r = exp(logp_proximal - logp_behavior), no gradient.

Legend: B rows, T positions. Log-ratios are 0 where a token carries no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from learners.config import CorrectionConfig
from learners.ratios import exp, row_mean, row_sum

Correction = Callable[[Tensor, Tensor, CorrectionConfig], tuple[Tensor, Tensor]]
"""(log r [B, T], mask [B, T] bool, settings) to (weight [B, T], cut [B, T] bool: where r itself is not the weight)."""


def none(log_r_BT: Tensor, mask_BT: Tensor, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """1: the loss has its own ratio to the behavior policy."""
    return torch.ones_like(log_r_BT), torch.zeros_like(mask_BT)


def truncate(log_r_BT: Tensor, mask_BT: Tensor, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """min(r, ``cap``).

    The weight of decoupled PPO (arXiv 2110.00641; for LLMs AReaL, arXiv 2505.24298), truncated as in IMPALA
    (arXiv 1802.01561, section 4.1). ``level`` makes r that of the whole completion, which is unbiased but spreads
    exponentially with its length (C26), or its geometric mean, which does not spread and is biased.
    """
    r_BT = _at_level(log_r_BT, mask_BT, correction.level)
    return r_BT.clamp(max=correction.cap), r_BT > correction.cap


def mask(log_r_BT: Tensor, mask_BT: Tensor, correction: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """r where ``floor`` <= r <= ``cap``, else 0: what the policies disagree on most is not trained.

    At the level of tokens this is IcePop (arXiv 2510.18855); at the others whole completions are left out.
    """
    r_BT = _at_level(log_r_BT, mask_BT, correction.level)
    outside_BT = (r_BT < correction.floor) | (r_BT > correction.cap)
    return torch.where(outside_BT, 0.0, r_BT), outside_BT


def interpolated(behavior_logp_BT: Tensor, logp_BT: Tensor, staleness_BT: Tensor) -> Tensor:
    """[B, T] log-probabilities of the policy one learner step before the present one, without a forward pass.

    logp_behavior + α (logp - logp_behavior), α = (v_proximal - v_behavior) / (v - v_behavior) with v_proximal = v - 1
    and the staleness v - v_behavior; α = 0 for a token of the present version (AReaL's log-linear approximation).
    """
    alpha_BT = (staleness_BT - 1).clamp(min=0) / staleness_BT.clamp(min=1)
    return behavior_logp_BT + alpha_BT * (logp_BT - behavior_logp_BT)


def _at_level(log_r_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    if level == "sequence":
        log_r_BT = row_sum(log_r_BT).expand_as(log_r_BT)
    elif level == "geometric":
        log_r_BT = row_mean(log_r_BT, mask_BT).expand_as(log_r_BT)
    return exp(log_r_BT)


CORRECTIONS: Mapping[str, Correction] = {"none": none, "truncate": truncate, "mask": mask}
