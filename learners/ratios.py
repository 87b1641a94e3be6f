"""Ratios of probabilities from differences of log-probabilities. Legend: B rows, T positions.

Log-ratios are 0 where a token carries no loss, and finite.
"""

from __future__ import annotations

from torch import Tensor

_MAX_LOG_RATIO = 20.0  # exp(20) is beyond any bound in use and far below overflow


def exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, which is held between -20 and 20 first."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def row_sum(values_BT: Tensor) -> Tensor:
    """[B, 1] sum of each row."""
    return values_BT.sum(-1, keepdim=True)


def row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, 1] mean over the tokens of each row that carry loss; 0 for a row without."""
    return row_sum(values_BT) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
