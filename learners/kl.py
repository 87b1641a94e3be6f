"""Estimates of KL(π, reference) from sampled tokens.

With log q = logp_reference - logp (J. Schulman, Approximating KL Divergence, 2020), for tokens sampled from π. Legend:
B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from learners.ratios import exp


def k1(log_q_BT: Tensor) -> Tensor:
    """[B, T] -log q: unbiased, of either sign."""
    return -log_q_BT


def k2(log_q_BT: Tensor) -> Tensor:
    """[B, T] (log q)² / 2: biased; on-policy its gradient is that of the divergence."""
    return log_q_BT.square() / 2


def k3(log_q_BT: Tensor) -> Tensor:
    """[B, T] q - 1 - log q: unbiased and never negative."""
    return exp(log_q_BT) - 1 - log_q_BT


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
