"""Policy losses: each a pure function from a micro-batch's log-probabilities to the loss of every token.

Legend: B rows, T positions. π: the policy in training. old: the policy that the ratio is to, which is the proximal one
under a correction and the behavior one without. A: advantage. Only π has a gradient. All log-probabilities are 0 where
a token carries no loss, so that no ratio there is anything but 1; what a loss returns there is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from learners.config import AlgorithmConfig
from learners.ratios import exp, row_mean, row_sum


class PolicyRows(NamedTuple):
    """What a loss is given. ``mask_BT`` is bool; ``advantage_BT`` varies within a row only where a critic made it."""

    logp_BT: Tensor
    old_logp_BT: Tensor
    behavior_logp_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor


Loss = Callable[[PolicyRows, AlgorithmConfig], tuple[Tensor, Tensor]]
"""Returns (loss [B, T], cut [B, T] bool): the loss of each token, to be minimised, and which are held by a bound."""


def ppo(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-min(ρ A, clip(ρ, 1 - ``clip_low``, 1 + ``clip_high``) A), with ρ = π / old.

    PPO (arXiv 1707.06347, equation 7); two bounds as in DAPO (arXiv 2503.14476, equation 8). ``dual_clip`` c: where A
    is negative, at most -c A (dual-clip PPO, arXiv 1912.09729), whatever the ratio.
    """
    rho_BT = exp(rows.logp_BT - rows.old_logp_BT)
    loss_BT, cut_BT = _clipped(rho_BT, rows.advantage_BT, algorithm)
    if algorithm.dual_clip:
        ceiling_BT = torch.where(rows.advantage_BT < 0, -algorithm.dual_clip * rows.advantage_BT, torch.inf)
        cut_BT = cut_BT | (loss_BT > ceiling_BT)
        loss_BT = torch.minimum(loss_BT, ceiling_BT)
    return loss_BT, cut_BT


def gspo(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The clip of ``ppo`` with one ratio a completion, s = exp(mean over its tokens of log(π / old)).

    GSPO (arXiv 2507.18071, equations 5 and 7). Its mean over completions is ``loss_mean: sequence``.
    """
    s_B1 = exp(row_mean(rows.logp_BT - rows.old_logp_BT, rows.mask_BT))
    return _clipped(s_B1.expand_as(rows.logp_BT), rows.advantage_BT, algorithm)


def cispo(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-min(ρ, 1 + ``clip_high``) A log π, the weight without gradient: no token is left out.

    CISPO (arXiv 2506.13585, equations 4 and 5), which in use has no lower bound.
    """
    rho_BT = exp(rows.logp_BT - rows.old_logp_BT).detach()
    ceiling = 1 + algorithm.clip_high
    return -rho_BT.clamp(max=ceiling) * rows.advantage_BT * rows.logp_BT, rho_BT > ceiling


def dppo(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-ρ A, and nothing for a token whose probability has moved too far the way that A pushes it.

    Too far: π - old above ``clip_high`` where A is positive, below -``clip_low`` where it is negative. This is the
    total variation between the two policies' choices of this token or another (DPPO-Binary-TV, arXiv 2602.04879); a
    ratio would hold back rare tokens and let frequent ones go.
    """
    moved_BT = (rows.logp_BT.exp() - rows.old_logp_BT.exp()).detach()
    up, down = rows.advantage_BT > 0, rows.advantage_BT < 0
    cut_BT = (up & (moved_BT > algorithm.clip_high)) | (down & (moved_BT < -algorithm.clip_low))
    rho_BT = exp(rows.logp_BT - rows.old_logp_BT)
    return torch.where(cut_BT, 0.0, -rho_BT * rows.advantage_BT), cut_BT


def topr(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-A log π where A is positive, -min(s, 1) A log π elsewhere; s = π / old of the whole completion, no gradient.

    Tapered off-policy REINFORCE (arXiv 2503.14286): good answers are learned whoever gave them, and bad ones are pushed
    away no further than the policy would still give them.
    """
    s_B1 = exp(row_sum(rows.logp_BT - rows.old_logp_BT)).detach()
    good_BT = rows.advantage_BT > 0
    weight_BT = torch.where(good_BT, 1.0, s_B1.clamp(max=1.0))
    cut_BT = ~good_BT & (s_B1 > 1.0)
    return -weight_BT * rows.advantage_BT * rows.logp_BT, cut_BT


def dpo(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-log sigmoid(``dpo_beta`` (h_best - h_worst)), h = log(π / old) of a whole completion.

    DPO (arXiv 2305.18290, equation 7) on the policy's own answers (online DPO, arXiv 2402.04792). Rows come in pairs,
    the best of a group before its worst. Every token of a pair has the pair's loss, so that ``loss_mean: sequence``
    makes the mean over pairs. old is the policy that sampled: there is no reference model.
    """
    cut_BT = torch.zeros_like(rows.mask_BT)
    if len(rows.logp_BT) % 2:  # the row without loss that stands for an empty micro-batch
        return rows.logp_BT * 0.0, cut_BT
    h_B1 = row_sum(rows.logp_BT - rows.old_logp_BT)
    loss_P1 = -F.logsigmoid(algorithm.dpo_beta * (h_B1[0::2] - h_B1[1::2]))
    return loss_P1.repeat_interleave(2, dim=0).expand_as(rows.logp_BT), cut_BT


def _clipped(rho_BT: Tensor, advantage_BT: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    clipped_BT = rho_BT.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain_BT, bound_BT = rho_BT * advantage_BT, clipped_BT * advantage_BT
    return -torch.minimum(gain_BT, bound_BT), bound_BT < gain_BT


LOSSES: Mapping[str, Loss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "dppo": dppo, "topr": topr, "dpo": dpo}
PAIRED = frozenset({"dpo"})
"""Losses whose rows are the best and the worst of a group, one after the other, in one micro-batch."""
