"""The numbers of one step, summed over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from broker.errors import SlipstreamError
from learners.objective import LossTerms

_MAXIMA = [LossTerms._fields.index(name) for name in ("ratio_max", "sequence_ratio_max")]


class NonFiniteGradients(SlipstreamError):
    """``learner.max_bad_steps`` optimizer steps in a row had gradients that are not finite."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One step, over all ranks. ``applied`` is False when no optimizer step had finite gradients: nothing has changed
    then.

    ``ratio_*`` are of the learner's policy, as each optimizer step finds it, to the behavior policy, per token and
    before any bound; ``sequence_ratio_max`` that of a whole completion; ``ess_share`` the effective sample size of the
    token ratios, (Σ r)² / Σ r², as a share of the tokens. ``kl_behavior`` (k3) and ``kl_behavior_k1`` estimate
    KL(behavior, current). ``rejected_share``: correction weight 0. Shares, KL and ``entropy`` (nats) are means over the
    loss tokens of all optimizer steps, ``loss`` and ``grad_norm`` over the optimizer steps. ``parts``: numbers of the
    reference model and of the critic, where there is one.
    """

    version: int
    applied: bool
    lr: float
    loss: float
    grad_norm: float
    updates: int
    skipped_updates: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    ess_share: float
    sequence_ratio_max: float
    rejected_share: float
    kl_behavior_k1: float
    kl_behavior: float
    entropy: float
    parts: Mapping[str, float] = field(default_factory=dict)


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


class Updates:
    """Watches the gradients of one module's optimizer steps. ``limit``: bad ones in a row that end the run."""

    def __init__(self, *, limit: int, lr_setting: str) -> None:
        self._limit, self._lr_setting = limit, lr_setting
        self._norms: list[float] = []
        self._bad = 0

    def saw(self, norm: float, *, version: int) -> None:
        """Takes in the gradient norm of an optimizer step; not finite: it had no effect. Raises NonFiniteGradients."""
        self._norms.append(norm)
        self._bad = 0 if math.isfinite(norm) else self._bad + 1
        if self._bad >= self._limit:
            raise NonFiniteGradients(
                f"{self._bad} steps in a row at version {version} had gradients that are not finite "
                f"(learner.max_bad_steps); lower {self._lr_setting}, or look at the batch's behavior log-probabilities"
            )

    def take(self) -> tuple[int, int, float]:
        """Since the last call: optimizer steps, those without effect, and the mean norm of the others (inf: none)."""
        norms, self._norms = self._norms, []
        good = [norm for norm in norms if math.isfinite(norm)]
        return len(norms), len(norms) - len(good), sum(good) / len(good) if good else math.inf if norms else 0.0


def over_ranks(sums: Sequence[float | Tensor], world: int, device: str) -> list[float]:
    """Collective. Sums over the ranks, in float64."""
    total = torch.stack([torch.as_tensor(one, dtype=torch.float64, device="cpu").detach() for one in sums]).to(device)
    if world > 1:
        dist.all_reduce(total)
    return [float(one) for one in total.cpu()]
