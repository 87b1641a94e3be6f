"""Log-probabilities and the loss against formulas written again in float64 numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learners.config import AlgorithmConfig, CorrectionConfig
from learners.losses import LossTerms, entropy, policy_loss, token_logprobs


def loss(*, algorithm: AlgorithmConfig | None = None, denominator: int | None = None, **given: Any) -> LossTerms:
    """policy_loss with what a test does not care about filled in."""
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in given.items()}
    logp = given.get("logp_BT") if isinstance(given.get("logp_BT"), Tensor) else tensors["logp_BT"]
    mask = tensors.get("mask_BT", torch.ones_like(logp))
    return policy_loss(
        logp_BT=logp,
        proximal_logp_BT=tensors.get("proximal_logp_BT", logp.detach()),
        behavior_logp_BT=tensors.get("behavior_logp_BT", logp.detach()),
        advantage_B=tensors.get("advantage_B", torch.ones(len(logp))),
        mask_BT=mask,
        entropy_BT=tensors.get("entropy_BT", torch.zeros_like(logp)),
        denominator=int(mask.sum()) if denominator is None else denominator,
        algorithm=algorithm or AlgorithmConfig(),
    )


def test_token_logprobs_and_entropy_are_those_of_the_softmax_at_the_temperature() -> None:
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 5, (3, 4, 17)), rng.integers(0, 17, (3, 4))
    scaled = logits / 0.7
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    got = token_logprobs(torch.tensor(logits).float(), torch.tensor(ids), temperature=0.7)
    np.testing.assert_allclose(got, np.log(np.take_along_axis(p, ids[..., None], -1)[..., 0]), atol=1e-5)
    spread = entropy(torch.tensor(logits).float(), temperature=0.7)
    np.testing.assert_allclose(spread, -(p * np.log(p)).sum(-1), atol=1e-5)


def test_c24_the_temperature_is_applied_on_the_learners_side_too() -> None:
    logp = token_logprobs(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0]]), temperature=0.5)
    assert logp.item() == pytest.approx(-0.1269, abs=1e-4)
    terms = loss(logp_BT=logp, behavior_logp_BT=[[-0.126928]])
    assert terms.ratio.item() == pytest.approx(1.0, abs=1e-4)  # 0.83 with the temperature on one side only


def test_c29_the_ratio_is_of_the_stored_logprobs_to_the_present_policys() -> None:
    lp0, lp1 = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.7, -2.4]])
    terms = loss(logp_BT=lp1, behavior_logp_BT=lp0)
    assert terms.ratio.item() == pytest.approx(math.exp(0.3) + math.exp(-0.4), rel=1e-6)


def test_decoupled_weighs_the_gradient_by_the_capped_ratio_without_a_gradient_of_its_own() -> None:
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    terms = loss(logp_BT=logp, behavior_logp_BT=[[-1.5, -4.0]], advantage_B=[3.0])
    terms.loss.backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-3 * math.exp(0.5) / 2, -3 * 2.0 / 2], rel=1e-6)
    assert terms.ratio_max.item() == pytest.approx(math.exp(3.0), rel=1e-6)  # reported before the cap
    assert terms.clipped.item() == 1


@pytest.mark.parametrize("kind", ["decoupled", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_the_published_formula(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp, prox, behavior = (rng.uniform(-3, -0.1, (4, 5)) for _ in range(3))
    advantage, mask, spread = rng.normal(size=4), rng.integers(0, 2, (4, 5)), rng.uniform(0, 2, (4, 5))
    mask[0, 0] = 1
    algorithm = AlgorithmConfig(
        clip_low=0.2,
        clip_high=0.28,
        entropy_coef=0.01,
        correction=CorrectionConfig(kind=kind, cap=1.5),  # type: ignore[arg-type]
    )
    total = 0.0
    for b, t in zip(*np.nonzero(mask), strict=True):
        old = prox if kind == "decoupled" else behavior
        rho, A = math.exp(logp[b, t] - old[b, t]), advantage[b]
        gain = min(rho * A, min(max(rho, 0.8), 1.28) * A)
        if kind == "decoupled":
            gain *= min(math.exp(prox[b, t] - behavior[b, t]), 1.5)
        total -= gain + 0.01 * spread[b, t]
    terms = loss(
        algorithm=algorithm, denominator=9, logp_BT=logp, proximal_logp_BT=prox, behavior_logp_BT=behavior,
        advantage_B=advantage, mask_BT=mask, entropy_BT=spread,
    )  # fmt: skip
    assert terms.loss.item() == pytest.approx(total / 9, rel=1e-5)
    k3 = [math.exp(d) - 1 - d for d in (logp - behavior)[mask.astype(bool)]]
    assert terms.kl.item() == pytest.approx(sum(k3), rel=1e-4)
    assert terms.entropy.item() == pytest.approx(spread[mask.astype(bool)].sum(), rel=1e-5)


def test_c94_masked_tokens_are_in_neither_sum_nor_gradient() -> None:
    # Token losses [[1, 100], [1, -50]] where rho is 1: the loss is minus the advantage times the ratio r.
    logp = torch.zeros(2, 2, requires_grad=True)
    algorithm = AlgorithmConfig(correction=CorrectionConfig(cap=1e6))
    behavior = [[0.0, -math.log(100)], [0.0, -math.log(50)]]
    terms = loss(
        algorithm=algorithm, logp_BT=logp, behavior_logp_BT=behavior, advantage_B=[-1.0, -1.0], mask_BT=[[1, 0], [1, 0]]
    )
    assert terms.loss.item() == pytest.approx(1.0)
    terms.loss.backward()
    assert logp.grad is not None
    assert logp.grad[:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_c94_garbage_at_masked_tokens_stays_out(garbage: float) -> None:
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    terms = loss(logp_BT=logp, behavior_logp_BT=[[-1.0, garbage]], mask_BT=[[1, 0]])
    terms.loss.backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == [-1.0, 0.0]
    assert all(math.isfinite(float(term.detach())) for term in terms)


def test_c95_the_mean_is_over_the_tokens_of_the_step_however_it_is_cut() -> None:
    one = loss(logp_BT=[[0.0]], behavior_logp_BT=[[0.0]], advantage_B=[-10.0], denominator=10)
    nine = loss(logp_BT=[[0.0] * 9], behavior_logp_BT=[[0.0] * 9], advantage_B=[0.0], denominator=10)
    assert (one.loss + nine.loss).item() == pytest.approx(1.0)


def test_c97_a_micro_batch_without_loss_tokens_has_loss_zero_and_finite_gradients() -> None:
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    terms = loss(logp_BT=logp, behavior_logp_BT=[[-1.0, math.nan]], mask_BT=[[0, 0]], denominator=0)
    terms.loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, 0.0]]
    assert [float(term.detach()) for term in terms] == [0.0] * len(terms)
