"""An own loss and an own advantage. `algorithm.loss=docs/examples/own_loss.py:loss`"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from learners.advantages import Values
from learners.config import AlgorithmConfig
from learners.losses import PolicyRows


def loss(rows: PolicyRows, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-ρ A + (ρ - 1)² |A| / (2 clip_high): instead of a clip, a parabola that pulls the ratio back."""
    rho_BT = (rows.logp_BT - rows.old_logp_BT).exp()
    gain_BT = rho_BT * rows.advantage_BT
    pull_BT = (rho_BT - 1).square() / (2 * algorithm.clip_high) * rows.advantage_BT.abs()
    return pull_BT - gain_BT, (rho_BT - 1).abs() > algorithm.clip_high


def median(groups: Sequence[Values]) -> list[Values]:
    """Reward less the group's median."""
    return [rewards - np.median(rewards) for rewards in groups]
