"""Generalised advantage estimation: an advantage of each token from rewards and a critic's values.

Legend: B rows, T positions. Only tokens that carry loss are steps; what an environment inserted, or what is too old to
be trained, is stepped over. All in float64 on the CPU: T small operations, one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(reward_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] the completion's reward at its last token that carries loss, 0 elsewhere."""
    last_BT = mask_BT & (mask_BT.long().flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last_BT, reward_B.unsqueeze(-1), 0.0)


def gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """(advantages [B, T], returns [B, T]), 0 without loss (arXiv 1506.02438, section 3).

    δ_t = r_t + γ V_{t+1} - V_t, A_t = δ_t + γ λ A_{t+1}; V and A are 0 after the last token, whether the answer was
    complete or cut off. The return is A_t + V_t.
    """
    reward_BT, value_BT = reward_BT.double(), value_BT.double()
    advantage_BT = torch.zeros_like(value_BT)
    next_value_B = next_advantage_B = value_BT.new_zeros(len(value_BT))
    for t in reversed(range(value_BT.shape[1])):
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        mine_B = delta_B + gamma * gae_lambda * next_advantage_B
        step_B = mask_BT[:, t]
        advantage_BT[:, t] = torch.where(step_B, mine_B, 0.0)
        next_advantage_B = torch.where(step_B, mine_B, next_advantage_B)
        next_value_B = torch.where(step_B, value_BT[:, t], next_value_B)
    return advantage_BT, torch.where(mask_BT, advantage_BT + value_BT, 0.0)
