"""Log-probabilities and the policy loss, as pure functions.

Legend: B rows, T positions, V vocabulary. z: logits. A: advantage. Three policies: behavior (the generator's, which
sampled), proximal (the learner's at the start of the step), current.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learners.config import AlgorithmConfig

_ENTROPY_ELEMENTS = 1 << 22  # logits turned into probabilities at once
_MAX_LOG_RATIO = 20.0  # exp(20) is beyond any cap in use and far below overflow


class LossTerms(NamedTuple):
    """Sums over the loss tokens of one micro-batch. ``loss`` carries the gradient, already over the denominator.

    ``ratio`` is the policy ratio to the behavior policy before any cap, ``clipped`` the number of tokens whose ratio
    was cut by the cap or by the clip, ``kl`` the k3 estimate of KL(behavior, current).
    """

    loss: Tensor
    ratio: Tensor
    ratio_max: Tensor
    clipped: Tensor
    kl: Tensor
    entropy: Tensor


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor, *, temperature: float) -> Tensor:
    """[B, T] log-probability of each token under softmax(z / temperature), the distribution it was sampled from (C24).

    z_token - logsumexp(z) needs no table of log-probabilities beside the logits.
    """
    scaled_BTV = scale(logits_BTV, temperature)
    chosen_BT = scaled_BTV.gather(-1, token_ids_BT.unsqueeze(-1)).squeeze(-1)
    return chosen_BT - scaled_BTV.logsumexp(-1)


def scale(logits_BTV: Tensor, temperature: float) -> Tensor:
    """Logits at ``temperature`` in float32; no copy at temperature 1."""
    logits_BTV = logits_BTV.float()
    return logits_BTV if temperature == 1.0 else logits_BTV / temperature


def entropy(logits_BTV: Tensor, *, temperature: float) -> Tensor:
    """[B, T] entropy in nats of softmax(z / temperature), a bounded number of positions at a time."""
    V = logits_BTV.shape[-1]
    parts = torch.split(logits_BTV.flatten(0, 1), max(1, _ENTROPY_ELEMENTS // V))
    return torch.cat([_entropy(scale(part_NV, temperature)) for part_NV in parts]).view(logits_BTV.shape[:-1])


def _entropy(logits_NV: Tensor) -> Tensor:
    return logits_NV.logsumexp(-1) - (logits_NV.softmax(-1) * logits_NV).sum(-1)


def policy_loss(
    *,
    logp_BT: Tensor,
    proximal_logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    advantage_B: Tensor,
    mask_BT: Tensor,
    entropy_BT: Tensor,
    denominator: int,
    algorithm: AlgorithmConfig,
) -> LossTerms:
    """Clipped policy loss, summed over the loss tokens and divided by ``denominator``, the step's loss tokens on all
    ranks together: the gradient depends on neither micro-batches nor ranks (C95).

    ``correction.kind`` ``decoupled`` (decoupled PPO, arXiv 2505.24298): r = exp(proximal - behavior), without gradient
    and at most ``correction.cap``, weighs the PPO clip in ρ = exp(current - proximal). ``none``: the PPO clip in
    ρ = exp(current - behavior), as if the behavior policy were the proximal one.
    """
    mask_BT = mask_BT.bool()

    def at_loss_tokens(values_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, values_BT, 0.0)  # before any exp: 0 * inf would be NaN (C94)

    logp_BT, behavior_BT = at_loss_tokens(logp_BT), at_loss_tokens(behavior_logp_BT)
    proximal_BT = at_loss_tokens(proximal_logp_BT).detach()
    decoupled = algorithm.correction.kind == "decoupled"
    rho_BT = _exp(logp_BT - (proximal_BT if decoupled else behavior_BT))
    clipped_BT = rho_BT.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    advantage_B1 = advantage_B.unsqueeze(-1)
    gain_BT = torch.minimum(rho_BT * advantage_B1, clipped_BT * advantage_B1)
    cut_BT = clipped_BT * advantage_B1 < rho_BT * advantage_B1
    ratio_BT = _exp((proximal_BT if decoupled else logp_BT.detach()) - behavior_BT)
    if decoupled:
        gain_BT = gain_BT * ratio_BT.clamp(max=algorithm.correction.cap)
        cut_BT = cut_BT | (ratio_BT > algorithm.correction.cap)
    gain_BT = at_loss_tokens(gain_BT + algorithm.entropy_coef * entropy_BT)
    log_q_BT = (logp_BT.detach() - behavior_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return LossTerms(
        loss=-gain_BT.sum() / max(1, denominator),
        ratio=at_loss_tokens(ratio_BT).sum(),
        ratio_max=at_loss_tokens(ratio_BT).max(),
        clipped=(cut_BT & mask_BT).sum(),
        kl=at_loss_tokens(log_q_BT.exp() - 1 - log_q_BT).sum(),
        entropy=at_loss_tokens(entropy_BT.detach()).sum(),
    )


def _exp(log_ratio_BT: Tensor) -> Tensor:
    return log_ratio_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
