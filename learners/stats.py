"""The numbers of one step, summed over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learners.objective import LossTerms

_MAXIMA = [LossTerms._fields.index(name) for name in ("ratio_max", "sequence_ratio_max")]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One step, over all ranks. ``applied`` is False when the gradients were not finite: nothing has changed then.

    ``ratio_*`` are of the learner's policy at the start of the step to the behavior policy, per token and before any
    bound; ``sequence_ratio_max`` that of a whole completion; ``ess_share`` the effective sample size of the token
    ratios, (Σ r)² / Σ r², as a share of the tokens. ``kl_behavior`` (k3) and ``kl_behavior_k1`` estimate KL(behavior,
    current). ``rejected_share``: correction weight 0. Shares, KL and ``entropy`` (nats) are means over loss tokens.
    """

    version: int
    applied: bool
    lr: float
    loss: float
    grad_norm: float
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    ess_share: float
    sequence_ratio_max: float
    rejected_share: float
    kl_behavior_k1: float
    kl_behavior: float
    entropy: float


class Totals:
    """Running sums of LossTerms; of what is a maximum, the maximum."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(LossTerms._fields), dtype=torch.float64)

    def add(self, terms: LossTerms) -> None:
        """Takes one micro-batch in."""
        self._merge(torch.stack([term.detach().double() for term in terms]).cpu())

    def over_ranks(self, world: int, device: str) -> LossTerms:
        """Collective. The totals of all ranks, in one gather."""
        if world > 1:
            gathered = [torch.empty_like(self._sums, device=device) for _ in range(world)]
            dist.all_gather(gathered, self._sums.to(device))
            self._sums = torch.zeros_like(self._sums)
            for part in gathered:
                self._merge(part.cpu())
        return LossTerms(*self._sums)

    def _merge(self, other: Tensor) -> None:
        largest = torch.maximum(self._sums[_MAXIMA], other[_MAXIMA])
        self._sums = self._sums + other
        self._sums[_MAXIMA] = largest
