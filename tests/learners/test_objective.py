"""What the loss of a micro-batch must not depend on, and what is reported of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learners.config import AlgorithmConfig
from learners.kl import ESTIMATORS
from learners.objective import LossTerms, Objective, WrongShape
from learners.recipes import RECIPES
from tasks.loading import TaskError
from tests.learners.formulas import Array, Case, case, differences, product, step_loss

GARBAGE = [math.nan, math.inf, -math.inf]
PLAIN = AlgorithmConfig(correction={"kind": "none"})  # type: ignore[arg-type]


def small(**changes: Any) -> Case:
    """Two rows of two tokens under equal policies, with what a test changes about them."""
    tokens = {name: np.full((2, 2), -1.0) for name in ("logp", "proximal", "behavior", "reference", "entropy")}
    rest = {"mask": np.ones((2, 2), bool), "advantage": np.ones(2), "weight": np.full(2, 0.25)}
    return Case(**{**tokens, **rest, **changes})  # type: ignore[arg-type]


def merged(parts: list[tuple[LossTerms, Array]]) -> tuple[float, Array]:
    return sum(terms.loss.item() for terms, _ in parts), np.concatenate([gradient for _, gradient in parts])


@pytest.mark.parametrize("recipe", RECIPES)
def test_c94_padding_and_garbage_behind_a_row_change_nothing(recipe: str) -> None:
    algorithm, one = AlgorithmConfig(recipe=recipe, entropy_coef=0.01), case(2)  # type: ignore[arg-type]
    (terms, gradient), (padded, wide) = product(one, algorithm), product(one.padded(7), algorithm)
    assert padded.loss.item() == pytest.approx(terms.loss.item(), rel=1e-12)
    np.testing.assert_allclose(wide[:, :5], gradient, atol=1e-12)
    assert not wide[:, 5:].any()
    for name in LossTerms._fields:
        expected = getattr(terms, name).item()
        assert getattr(padded, name).item() == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_order_of_rows_changes_nothing(recipe: str) -> None:
    algorithm, one, order = AlgorithmConfig(recipe=recipe), case(3), [4, 5, 0, 1, 2, 3]  # type: ignore[arg-type]
    (terms, gradient), (turned, other) = product(one, algorithm), product(one.rows(order), algorithm)
    assert turned.loss.item() == pytest.approx(terms.loss.item(), rel=1e-12)
    np.testing.assert_allclose(other, gradient[order], atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cuts", [[2], [4], [2, 4]])
def test_c95_micro_batches_of_any_size_give_the_same_loss_and_gradient(recipe: str, cuts: list[int]) -> None:
    algorithm, one = AlgorithmConfig(recipe=recipe, entropy_coef=0.01), case(4)  # type: ignore[arg-type]
    whole, gradient = merged([product(one, algorithm)])
    parts = [product(one.rows(part.tolist()), algorithm) for part in np.split(np.arange(6), cuts)]
    loss, together = merged(parts)
    assert loss == pytest.approx(whole, rel=1e-12)
    np.testing.assert_allclose(together, gradient, atol=1e-12)


def test_c94_masked_tokens_are_in_neither_sum_nor_gradient() -> None:
    # Token losses [[1, 100], [1, -50]] where the ratio is 1: minus the advantage times the correction.
    algorithm = AlgorithmConfig(correction={"cap": 1e6})  # type: ignore[arg-type]
    behavior = np.array([[-1.0, -1.0 - math.log(100)], [-1.0, -1.0 - math.log(50)]])
    mask, advantage = np.array([[1, 0], [1, 0]], bool), np.array([-1.0, -1.0])
    terms, gradient = product(
        small(behavior=behavior, mask=mask, advantage=advantage, weight=np.full(2, 0.5)), algorithm
    )
    assert terms.loss.item() == pytest.approx(1.0)
    assert not gradient[:, 1].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_c94_garbage_at_masked_tokens_stays_out(recipe: str, garbage: float) -> None:
    algorithm = AlgorithmConfig(recipe=recipe, entropy_coef=0.01)  # type: ignore[arg-type]
    mask, spoilt = np.array([[1, 0], [1, 0]], bool), np.array([[-1.0, garbage], [-1.0, garbage]])
    one = small(mask=mask, **dict.fromkeys(("proximal", "behavior", "entropy"), spoilt))
    terms, gradient = product(one, algorithm)
    assert np.isfinite(gradient).all()
    assert gradient[:, 0].all() and not gradient[:, 1].any()
    assert all(math.isfinite(float(term.detach())) for term in terms)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_c97_a_micro_batch_without_loss_tokens_has_loss_zero_and_finite_gradients(recipe: str, rows: int) -> None:
    algorithm, chosen = AlgorithmConfig(recipe=recipe), list(range(rows))  # type: ignore[arg-type]
    one = small(mask=np.zeros((2, 2), bool), behavior=np.full((2, 2), np.nan), weight=np.zeros(2)).rows(chosen)
    terms, gradient = product(one, algorithm)
    assert gradient.tolist() == [[0.0, 0.0]] * rows
    assert [float(term.detach()) for term in terms] == [0.0] * len(terms)


def test_c26_a_constant_gap_is_told_apart_for_tokens_and_sequences() -> None:
    logp = np.full((2, 100), -1.0)
    behavior = logp.copy()
    behavior[0] -= 0.012
    one = Case(
        logp=logp, proximal=logp, behavior=behavior, reference=logp, entropy=np.zeros_like(logp),
        mask=np.ones_like(logp, bool), advantage=np.ones(2), weight=np.full(2, 1 / 200),
    )  # fmt: skip
    terms, _ = product(one, AlgorithmConfig(correction={"kind": "mask", "level": "sequence", "cap": 2.0}))  # type: ignore[arg-type]
    assert terms.sequence_ratio_max.item() == pytest.approx(3.32, abs=0.01)
    assert terms.ratio_max.item() == pytest.approx(math.exp(0.012))
    assert -terms.kl_k1.item() / 200 == pytest.approx(0.006)
    assert terms.rejected.item() == 100
    per_token, _ = product(one, AlgorithmConfig(recipe="icepop"))
    assert per_token.rejected.item() == 0


def test_c29_the_ratio_is_of_the_stored_logprobs_to_the_present_policys() -> None:
    lp0, lp1 = np.array([[-1.0, -2.0]] * 2), np.array([[-0.7, -2.4]] * 2)
    for algorithm in (PLAIN, AlgorithmConfig(), AlgorithmConfig(recipe="dapo")):
        terms, _ = product(small(logp=lp1, proximal=lp1, behavior=lp0), algorithm)
        assert terms.ratio.item() == pytest.approx(2 * (math.exp(0.3) + math.exp(-0.4)), rel=1e-12)
        assert terms.ratio_max.item() == pytest.approx(math.exp(0.3))


def test_what_is_reported_is_what_numpy_counts() -> None:
    one = case(5)
    terms, _ = product(one, AlgorithmConfig(correction={"cap": 1.5}))  # type: ignore[arg-type]
    gap = (one.logp - one.behavior)[one.mask]
    assert terms.ratio.item() == pytest.approx(np.exp(gap).sum())
    assert terms.ratio_squared.item() == pytest.approx(np.exp(2 * gap).sum())
    assert terms.kl_k1.item() == pytest.approx(-gap.sum())
    assert terms.kl_k3.item() == pytest.approx((np.exp(gap) - 1 - gap).sum())
    assert terms.entropy.item() == pytest.approx(one.entropy[one.mask].sum())
    rows = [np.exp((one.logp - one.behavior)[b][one.mask[b]].sum()) for b in range(len(one.logp))]
    assert terms.sequence_ratio_max.item() == pytest.approx(max(rows))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_to_a_reference_is_added_with_its_gradient(estimator: str) -> None:
    algorithm, one = AlgorithmConfig(kl_estimator=estimator, kl_coef=0.05), case(6)  # type: ignore[arg-type]
    terms, gradient = product(one, algorithm, reference=True)
    assert terms.loss.item() == pytest.approx(step_loss(one, algorithm, one.logp, reference=True), rel=1e-12)
    expected = differences(lambda logp: step_loss(one, algorithm, logp, reference=True), one.logp)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)
    assert terms.loss.item() != pytest.approx(step_loss(one, algorithm, one.logp))


def test_the_estimators_agree_on_the_divergence_over_all_tokens() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.48, 0.34, 0.18], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    means = {name: (p * estimate((q / p).log())).sum().item() for name, estimate in ESTIMATORS.items()}
    assert means["k1"] == pytest.approx(exact, rel=1e-9)
    assert means["k3"] == pytest.approx(exact, rel=1e-9)
    assert means["k2"] == pytest.approx(exact, rel=0.05)


OWN = """
def loss(rows, algorithm):
    ratio = (rows.logp_BT - rows.old_logp_BT).exp()
    return -ratio * rows.advantage_BT, ratio > 1e9

def halved(log_r, mask, correction):
    return 0 * log_r + 0.5, log_r > 1e9

def scalar(rows, algorithm):
    return rows.logp_BT.sum()
"""


def test_a_loss_and_a_correction_come_from_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(OWN)
    one = case(7)
    wide = {"clip_low": 1e6, "clip_high": 1e6, "correction": {"kind": "none"}}
    mine = AlgorithmConfig(loss=f"{file}:loss", correction={"kind": "none"})  # type: ignore[arg-type]
    terms, gradient = product(one, mine)
    unbounded, expected = product(one, AlgorithmConfig(**wide))  # type: ignore[arg-type]
    assert terms.loss.item() == pytest.approx(unbounded.loss.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    on_policy = replace(one, proximal=one.logp)
    half = AlgorithmConfig(correction={"kind": f"{file}:halved"})  # type: ignore[arg-type]
    _, halved = product(on_policy, half)
    np.testing.assert_allclose(halved, -0.5 * (one.weight * one.advantage)[:, None] * one.mask, rtol=1e-12)


def test_a_users_loss_that_is_not_there_or_returns_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(OWN)
    with pytest.raises(TaskError, match=r"algorithm\.loss: .*'los'.*did you mean 'loss'"):
        Objective.of(AlgorithmConfig(loss=f"{file}:los"))
    with pytest.raises(
        WrongShape, match=r"algorithm\.loss=.*my_loss\.py:scalar: expected two tensors of shape \(6, 5\)"
    ):
        product(case(0), AlgorithmConfig(loss=f"{file}:scalar"))
