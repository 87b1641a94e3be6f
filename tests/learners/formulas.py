"""Every loss and correction once more, as published, in float64 loops that share nothing with the product.

``case`` makes a small micro-batch; ``step_loss`` is its loss as a function of the current log-probabilities. What a
method treats as a constant is taken from ``frozen``, so that differences of ``step_loss`` are the gradient it defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from learners.config import AlgorithmConfig
from learners.objective import LossTerms, Objective, policy_loss

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Case:
    """[B, T] arrays, and [B] ``advantage`` and ``weight``."""

    logp: Array
    proximal: Array
    behavior: Array
    reference: Array
    entropy: Array
    mask: NDArray[np.bool_]
    advantage: Array
    weight: Array

    def rows(self, chosen: list[int]) -> Case:
        """These rows alone, in this order."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    def padded(self, columns: int) -> Case:
        """The same with columns of garbage behind, masked."""
        garbage = {"mask": False, "logp": -1e30}
        return replace(
            self,
            **{
                name: np.pad(getattr(self, name), ((0, 0), (0, columns)), constant_values=garbage.get(name, np.nan))
                for name in ("logp", "proximal", "behavior", "reference", "entropy", "mask")
            },
        )


def case(seed: int, *, B: int = 6, T: int = 5, spread: float = 0.6) -> Case:
    """Policies that differ, a few masked tokens, pairs of one better and one worse row."""
    rng = np.random.default_rng(seed)
    logp = rng.uniform(-3.0, -0.1, (B, T))
    mask = rng.random((B, T)) < 0.7
    mask[:, 0] = True
    sizes = np.abs(rng.normal(size=B)) + 0.1
    return Case(
        logp=logp,
        proximal=logp + rng.normal(0, spread, (B, T)),
        behavior=logp + rng.normal(0, spread, (B, T)),
        reference=logp + rng.normal(0, spread, (B, T)),
        entropy=rng.uniform(0, 2, (B, T)),
        mask=mask,
        advantage=sizes * np.where(np.arange(B) % 2, -1.0, 1.0),
        weight=rng.uniform(0.05, 0.2, B),
    )


def product(one: Case, algorithm: AlgorithmConfig, *, reference: bool = False) -> tuple[LossTerms, Array]:
    """What policy_loss makes of a case in float64, and its gradient by the current log-probabilities."""
    tensors = {name: torch.tensor(getattr(one, name)) for name in one.__dataclass_fields__}
    logp = tensors["logp"].requires_grad_()
    terms = policy_loss(
        Objective.of(algorithm),
        logp_BT=logp,
        proximal_logp_BT=tensors["proximal"],
        behavior_logp_BT=tensors["behavior"],
        advantage_BT=tensors["advantage"].view(len(one.logp), -1),
        weight_B=tensors["weight"],
        mask_BT=tensors["mask"],
        entropy_BT=tensors["entropy"],
        reference_logp_BT=tensors["reference"] if reference else None,
    )
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    return terms, logp.grad.numpy()


def step_loss(one: Case, algorithm: AlgorithmConfig, logp: Array, *, reference: bool = False) -> float:
    """The loss at ``logp``, with the constants of the method at ``one.logp``."""
    old = one.behavior if algorithm.correction.kind == "none" else one.proximal
    total = 0.0
    for b in range(len(logp)):
        tokens = np.flatnonzero(one.mask[b]).tolist()
        weights = _corrections([one.proximal[b, t] - one.behavior[b, t] for t in tokens], algorithm)
        for t, weight in zip(tokens, weights, strict=True):
            loss = weight * _LOSSES[algorithm.loss](one, algorithm, logp, old, b, t)
            loss -= algorithm.entropy_coef * one.entropy[b, t]
            if reference:
                log_q = one.reference[b, t] - logp[b, t]
                kl = {"k1": -log_q, "k2": log_q**2 / 2, "k3": math.exp(log_q) - 1 - log_q}
                loss += algorithm.kl_coef * kl[algorithm.kl_estimator]
            total += one.weight[b] * loss
    return total


def differences(function: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    """Central differences of a function of an array."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


def _corrections(log_ratios: list[float], algorithm: AlgorithmConfig) -> list[float]:
    correction = algorithm.correction
    if correction.kind == "none":
        return [1.0] * len(log_ratios)
    if correction.level == "token":
        ratios = [math.exp(one) for one in log_ratios]
    else:
        total = sum(log_ratios) / (len(log_ratios) if correction.level == "geometric" else 1)
        ratios = [math.exp(total)] * len(log_ratios)
    if correction.kind == "truncate":
        return [min(r, correction.cap) for r in ratios]
    return [r if correction.floor <= r <= correction.cap else 0.0 for r in ratios]


def _clip(rho: float, A: float, s: AlgorithmConfig) -> float:
    return -min(rho * A, min(max(rho, 1 - s.clip_low), 1 + s.clip_high) * A)


def _ppo(one: Case, s: AlgorithmConfig, logp: Array, old: Array, b: int, t: int) -> float:
    A = one.advantage[b]
    loss = _clip(math.exp(logp[b, t] - old[b, t]), A, s)
    return min(loss, -s.dual_clip * A) if s.dual_clip and A < 0 else loss


def _gspo(one: Case, s: AlgorithmConfig, logp: Array, old: Array, b: int, t: int) -> float:
    own = one.mask[b]
    return _clip(math.exp((logp[b, own] - old[b, own]).mean()), one.advantage[b], s)


def _cispo(one: Case, s: AlgorithmConfig, logp: Array, old: Array, b: int, t: int) -> float:
    weight = min(math.exp(one.logp[b, t] - old[b, t]), 1 + s.clip_high)
    return -weight * one.advantage[b] * logp[b, t]


def _dppo(one: Case, s: AlgorithmConfig, logp: Array, old: Array, b: int, t: int) -> float:
    A, moved = one.advantage[b], math.exp(one.logp[b, t]) - math.exp(old[b, t])
    away = (A > 0 and moved > s.clip_high) or (A < 0 and moved < -s.clip_low)
    return 0.0 if away else -math.exp(logp[b, t] - old[b, t]) * A


def _topr(one: Case, s: AlgorithmConfig, logp: Array, old: Array, b: int, t: int) -> float:
    own, A = one.mask[b], one.advantage[b]
    weight = 1.0 if A > 0 else min(1.0, math.exp((one.logp[b, own] - old[b, own]).sum()))
    return -weight * A * logp[b, t]


def _dpo(one: Case, s: AlgorithmConfig, logp: Array, old: Array, b: int, t: int) -> float:
    best, worst = b - b % 2, b - b % 2 + 1
    h = [(logp[i, one.mask[i]] - old[i, one.mask[i]]).sum() for i in (best, worst)]
    return math.log1p(math.exp(-s.dpo_beta * (h[0] - h[1])))


_LOSSES = {"ppo": _ppo, "gspo": _gspo, "cispo": _cispo, "dppo": _dppo, "topr": _topr, "dpo": _dpo}
