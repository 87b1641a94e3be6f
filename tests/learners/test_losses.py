"""Every loss and correction against the published formula in float64, and its gradient against differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from learners.config import AlgorithmConfig
from learners.corrections import CORRECTIONS, interpolated
from learners.losses import LOSSES, PAIRED
from learners.recipes import CORRECTION_NAMES, LOSS_NAMES, RECIPES
from tests.learners.formulas import case, differences, product, step_loss

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"recipe": name} for name in RECIPES},
    "clip alone": {"correction": {"kind": "none"}, "clip_high": 0.28},
    "dual clip": {"correction": {"kind": "none"}, "dual_clip": 1.4},
    "decoupled": {"proximal": "interpolated", "clip_low": 0.1, "clip_high": 0.28},
    "decoupled gspo": {"loss": "gspo", "proximal": "interpolated"},
    "decoupled cispo": {"loss": "cispo", "proximal": "interpolated"},
    "decoupled dppo": {"loss": "dppo", "proximal": "interpolated"},
    **{
        f"{kind} {level}": {"correction": {"kind": kind, "level": level, "cap": 1.8, "floor": 0.3}}
        for kind in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    },
    "tight cispo": {"recipe": "cispo", "clip_high": 0.3},
    "entropy": {"entropy_coef": 0.01},
}


def test_every_name_that_a_setting_may_have_is_a_function() -> None:
    assert set(LOSSES) == set(LOSS_NAMES)
    assert set(CORRECTIONS) == set(CORRECTION_NAMES)
    assert {VARIANTS[name].get("loss", AlgorithmConfig(recipe=name).loss) for name in RECIPES} == set(LOSS_NAMES)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_is_the_published_formula_and_so_is_its_gradient(variant: str, seed: int) -> None:
    algorithm, one = AlgorithmConfig(**VARIANTS[variant]), case(seed)
    terms, gradient = product(one, algorithm)
    assert terms.loss.item() == pytest.approx(step_loss(one, algorithm, one.logp), rel=1e-12)
    expected = differences(lambda logp: step_loss(one, algorithm, logp), one.logp)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)
    assert np.abs(gradient).max() > 1e-3
    assert not gradient[~one.mask].any()


@pytest.mark.parametrize(
    "variant", ["clip alone", "dual clip", "decoupled", "gspo", "tight cispo", "dppo", "topr", "icepop"]
)
def test_a_bound_acts_somewhere_in_these_cases_and_is_counted(variant: str) -> None:
    free = {"clip_low": 1e6, "clip_high": 1e6, "correction": {"kind": "none"}}
    algorithm, one = AlgorithmConfig(**VARIANTS[variant]), case(0)
    terms, _ = product(one, algorithm)
    assert 0 < terms.clipped.item() < one.mask.sum()
    if algorithm.loss != "topr":  # which has no bound to widen
        widened = AlgorithmConfig(loss=algorithm.loss, **free)  # type: ignore[arg-type]
        assert product(one, widened)[0].clipped.item() == 0


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "entropy"])
def test_on_policy_every_correction_and_ratio_is_the_plain_policy_gradient(variant: str) -> None:
    algorithm, base = AlgorithmConfig(**VARIANTS[variant]), case(1)
    one = type(base)(**{**base.__dict__, "proximal": base.logp, "behavior": base.logp})
    _, gradient = product(one, algorithm)
    scale = (one.weight * one.advantage)[:, None] * one.mask
    if (
        algorithm.loss == "gspo"
    ):  # one ratio a completion: its gradient is spread evenly over the tokens, as their sum is
        np.testing.assert_allclose(gradient.sum(-1), -scale.sum(-1), rtol=1e-12)
    elif (
        algorithm.loss in PAIRED
    ):  # at h = 0 the gradient of the pair is beta / 2, up for the best and down for the worst
        tokens = (one.weight * one.mask.sum(-1)).reshape(-1, 2).sum(-1).repeat(2)
        sign = np.where(np.arange(len(tokens)) % 2, -1.0, 1.0)
        np.testing.assert_allclose(gradient, (-algorithm.dpo_beta / 2 * tokens * sign)[:, None] * one.mask, rtol=1e-12)
    else:
        np.testing.assert_allclose(gradient, -scale, rtol=1e-12)


def test_the_proximal_policy_of_a_step_before_lies_between_by_the_versions() -> None:
    behavior, present = torch.tensor([[-1.0] * 4]), torch.tensor([[-3.0] * 4])
    got = interpolated(behavior, present, torch.tensor([[0, 1, 2, 4]]))
    # v = 10, v_proximal = 9: sampled at 10 and 9 it is the behavior policy, at 8 half way, at 6 three quarters.
    assert got[0].tolist() == [-1.0, -1.0, -2.0, -2.5]


def test_decoupled_ppo_with_the_interpolated_policy_splits_the_whole_ratio() -> None:
    behavior, present, staleness = torch.tensor([[-1.0]]), torch.tensor([[-1.6]]), torch.tensor([[3]])
    proximal = interpolated(behavior, present, staleness)
    r, rho = (proximal - behavior).exp(), (present - proximal).exp()
    assert (r * rho).item() == pytest.approx(math.exp(-0.6))
    assert r.item() == pytest.approx(math.exp(-0.4))
