"""The numbers of one step, summed over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learners.losses import LossTerms

_MAXIMA = LossTerms._fields.index("ratio_max")


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One step, over all ranks. ``applied`` is False when the gradients were not finite: nothing has changed then.

    ``ratio_*`` are of exp(proximal - behavior) before the cap, ``kl_behavior`` the k3 estimate of KL(behavior,
    current); both, ``clip_fraction`` and ``entropy`` (nats) are means over loss tokens.
    """

    version: int
    applied: bool
    lr: float
    loss: float
    grad_norm: float
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    kl_behavior: float
    entropy: float


class Totals:
    """Running sums of LossTerms; of ``ratio_max``, the maximum."""

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
