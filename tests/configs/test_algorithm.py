"""The section `algorithm`: recipes, names, and combinations that do not make sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from broker.config import RolloutConfig
from configs import show
from configs.load import ConfigError, load
from learners.config import AlgorithmConfig, CorrectionConfig
from learners.recipes import ADVANTAGE_NAMES, CORRECTION_NAMES, LOSS_MEAN_NAMES, LOSS_NAMES, RECIPES
from learners.rows import trained_rows
from tests.learners.conftest import make_batch, make_completion, make_group
from tests.learners.formulas import case, product

ROOT = Path(__file__).parents[2]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load("smollm2_gsm8k_cpu", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_is_one_setting_and_its_name_is_checked() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["recipe"].annotation)) == set(RECIPES)
    gspo = load("smollm2_gsm8k_cpu", ["algorithm.recipe=gspo"]).algorithm
    assert (gspo.loss, gspo.loss_mean, gspo.correction.kind, gspo.clip_low) == ("gspo", "sequence", "none", 3e-4)
    assert "did you mean gspo?" in refused("algorithm.recipe=gsp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_is_shown_so_that_it_loads_again_equal(recipe: str, tmp_path: Path) -> None:
    config = load("smollm2_gsm8k_cpu", [f"algorithm.recipe={recipe}"])
    file = tmp_path / "run.yaml"
    file.write_text(show.render(config))
    assert load(file) == config


def test_what_is_given_stays_and_the_recipe_fills_the_rest() -> None:
    given = ["algorithm.recipe=icepop", "algorithm.correction.cap=3", "algorithm.entropy_coef=0.5"]
    algorithm = load("smollm2_gsm8k_cpu", given).algorithm
    assert (algorithm.correction.kind, algorithm.correction.cap, algorithm.correction.floor) == ("mask", 3.0, 0.5)
    assert algorithm.entropy_coef == 0.5


def test_the_default_is_grpo_with_a_correction() -> None:
    assert AlgorithmConfig() == AlgorithmConfig(recipe="grpo")
    assert AlgorithmConfig().correction.kind == "truncate"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["loss=gpso"], ['algorithm.loss="gpso"', "expected ppo, gspo,", "or file.py:function", "did you mean gspo?"]),
        (["advantage=grop"], ['algorithm.advantage="grop"', "did you mean grpo?"]),
        (["loss_mean=tokens"], ['algorithm.loss_mean="tokens"', "did you mean token?"]),
        (["correction.kind=truncated"], ['algorithm.correction.kind="truncated"', "did you mean truncate?"]),
        (["loss=mine.py:1"], ["algorithm.loss", "file.py:function"]),
        (["advantage=gea"], ['algorithm.advantage="gea"', "best_worst, gae, or file.py", "did you mean gae?"]),
        (["advantage=gae"], ["algorithm.advantage=gae needs a critic", "set algorithm.critic.enabled=true"]),
        (
            ["critic.enabled=true"],
            [
                "algorithm.critic.enabled=true",
                "algorithm.advantage=grpo",
                "set algorithm.critic.enabled=false",
                "algorithm.advantage=gae",
            ],
        ),
        (["recipe=ppo", "advantage=grpo"], ["algorithm.critic.enabled=true", "algorithm.advantage=grpo"]),
        (["critic.gamma=0.9"], ["algorithm.critic.gamma=0.9 has no critic", "or algorithm.critic.gamma=1"]),
        (
            ["recipe=ppo", "epochs=1", "mini_batches=1", "critic.value_clip=0.1"],
            ["algorithm.critic.value_clip=0.1 never acts", "algorithm.epochs=2"],
        ),
        (["recipe=ppo", "zero_variance_groups=skip"], ["algorithm.zero_variance_groups=skip", "=gae", "=train"]),
        (["recipe=ppo", "loss=dpo"], ["algorithm.advantage=gae", "set algorithm.advantage=best_worst"]),
        (
            ["loss=gspo"],
            ["algorithm.correction.kind=truncate", "algorithm.loss=gspo", "algorithm.correction.kind=none"],
        ),
        (["loss=cispo", "correction.kind=mask"], ["algorithm.correction.kind=mask", "algorithm.proximal=interpolated"]),
        (
            ["recipe=topr", "correction.kind=mask"],
            ["algorithm.correction.kind=mask", "set algorithm.correction.kind=none"],
        ),
        (["recipe=dpo", "advantage=grpo"], ["algorithm.advantage=grpo", "set algorithm.advantage=best_worst"]),
        (["recipe=dpo", "loss_mean=token"], ["algorithm.loss_mean=token", "set algorithm.loss_mean=sequence"]),
        (["clip_high=0.28"], ["algorithm.clip_high=0.28 never acts", "set algorithm.proximal=interpolated"]),
        (["clip_low=0.1"], ["algorithm.clip_low=0.1 never acts", "set algorithm.proximal=interpolated"]),
        (["dual_clip=3"], ["algorithm.dual_clip=3 never acts", "set algorithm.proximal=interpolated"]),
        (["recipe=gspo", "dual_clip=3"], ["algorithm.dual_clip=3", "algorithm.loss=ppo", "set algorithm.dual_clip=0"]),
        (
            ["proximal=interpolated", "dual_clip=0.5"],
            ["algorithm.dual_clip=0.5", "above 1", "set algorithm.dual_clip=3"],
        ),
        (
            ["proximal=interpolated", "correction.kind=none"],
            ["algorithm.proximal=interpolated", "set algorithm.proximal=start"],
        ),
        (
            ["correction.kind=mask", "correction.floor=2"],
            ["algorithm.correction.floor=2", "algorithm.correction.cap=2"],
        ),
        (["clip_high=0.28", "proximal=recomputed"], ["algorithm.proximal=recomputed", "algorithm.epochs=2"]),
        (["loss=gspo", "proximal=recomputed"], ["algorithm.proximal=recomputed", "algorithm.epochs=2"]),
        (
            ["recipe=gspo", "proximal=recomputed"],
            ["algorithm.proximal=recomputed is of no use", "set algorithm.proximal=start"],
        ),
        (["reference_reset_steps=5"], ["algorithm.reference_reset_steps=5", "algorithm.kl_coef above 0"]),
        (["recipe=dpo", "kl_coef=0.1", "kl_in=reward"], ["algorithm.kl_in=reward", "set algorithm.kl_in=loss"]),
        (["epochs=0"], ["algorithm.epochs=0", "greater than or equal to 1"]),
        (["kl_coef=0.1", "kl_estimator=k1"], ["algorithm.kl_estimator=k1", "k2 or k3", "algorithm.kl_in=reward"]),
        (["recipe=dapo", "advantage=reinforce_pp"], ["algorithm.zero_variance_groups=skip", "=train"]),
        (["overlong_share=1.5"], ["algorithm.overlong_share=1.5", "less than or equal to 1"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_key_value_and_the_nearest_that_can(
    overrides: list[str], named: list[str]
) -> None:
    told = refused(*(f"algorithm.{one}" for one in overrides))
    assert all(part in told for part in named), told


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    told = refused("rollout.completions_per_group=1")
    assert "rollout.completions_per_group=1" in told and "algorithm.advantage=reinforce_pp" in told
    load("smollm2_gsm8k_cpu", ["rollout.completions_per_group=1", "algorithm.recipe=reinforce_pp"])


@pytest.mark.parametrize("steps", ["epochs=2", "mini_batches=2"])
def test_with_more_than_one_optimizer_step_the_ratio_moves_and_may_be_bounded(steps: str) -> None:
    for settings in (["clip_high=0.28"], ["loss=gspo"], ["loss=cispo"], ["dual_clip=3"]):
        assert refused(*(f"algorithm.{one}" for one in settings))
        load("smollm2_gsm8k_cpu", [f"algorithm.{one}" for one in (*settings, steps)])


def test_a_batch_has_a_group_for_each_mini_batch() -> None:
    told = refused("algorithm.mini_batches=9", "rollout.groups_per_step=8")
    assert "algorithm.mini_batches=9" in told and "rollout.groups_per_step=8" in told


def test_a_combination_that_is_refused_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "launch.cli", "up", "algorithm.loss=gspo", f"output_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "set algorithm.correction.kind=none" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


LOSS_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss": ({"correction": {"kind": "none"}}, {"loss": "cispo"}),
    "clip_low": ({"correction": {"kind": "none"}}, {"clip_low": 0.05}),
    "clip_high": ({"correction": {"kind": "none"}}, {"clip_high": 2.0}),
    "dual_clip": ({"correction": {"kind": "none"}}, {"dual_clip": 1.05}),
    "dpo_beta": ({"recipe": "dpo"}, {"dpo_beta": 0.3}),
    "correction.kind": ({}, {"correction": {"kind": "mask"}}),
    "correction.level": ({}, {"correction": {"level": "sequence"}}),
    "correction.cap": ({}, {"correction": {"cap": 1.1}}),
    "correction.floor": ({"recipe": "icepop"}, {"correction": {"floor": 0.9}}),
    "entropy_coef": ({}, {"entropy_coef": 0.1}),
}
ROW_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recipe": ({}, {"recipe": "rloo"}),
    "advantage": ({}, {"advantage": "rloo"}),
    "loss_mean": ({}, {"loss_mean": "sequence"}),
    "overlong_share": ({}, {"overlong_share": 0.5}),
    "overlong_penalty": ({"overlong_share": 0.5}, {"overlong_penalty": 0.3}),
    "zero_variance_groups": ({}, {"zero_variance_groups": "skip"}),
}


@pytest.mark.parametrize("key", LOSS_KEYS)
def test_c105_a_setting_of_the_loss_changes_the_loss(key: str) -> None:
    base, change = LOSS_KEYS[key]
    one = case(0)
    before, _ = product(one, AlgorithmConfig(**base))
    after, _ = product(one, AlgorithmConfig(**{**base, **change}))
    assert abs(before.loss.item() - after.loss.item()) > 1e-4


@pytest.mark.parametrize("key", ROW_KEYS)
def test_c105_a_setting_of_the_rewards_changes_the_rows(key: str) -> None:
    base, change = ROW_KEYS[key]
    mixed = make_group([make_completion([1] * size, reward=float(size == 2)) for size in (2, 5, 8)], position=0)
    same = make_group([make_completion([1] * 3, reward=1.0) for _ in range(3)], position=1)
    batch = make_batch([mixed, same], version=1)

    def numbers(settings: dict[str, Any]) -> list[tuple[float, float]]:
        parts = trained_rows(
            batch, version=1, algorithm=AlgorithmConfig(**settings), rollout=RolloutConfig(max_response_length=8)
        )
        return [(row.advantage, row.weight) for rows in parts for row in rows]

    assert numbers(base) != numbers({**base, **change})


def test_c105_every_setting_of_the_algorithm_is_in_one_of_the_tables() -> None:
    corrections = {f"correction.{name}" for name in CorrectionConfig.model_fields}
    settings = (set(AlgorithmConfig.model_fields) - {"correction"}) | corrections
    elsewhere = {
        *("proximal", "mini_batches", "epochs", "kl_coef", "kl_estimator", "kl_in", "reference_reset_steps", "critic"),
    }  # what takes passes or optimizer steps: in the policy's own tests
    assert set(LOSS_KEYS) | set(ROW_KEYS) | elsewhere == settings


def test_the_page_shows_the_example_as_it_is_and_has_every_name() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert f"```python\n{(ROOT / 'docs' / 'examples' / 'own_loss.py').read_text()}```" in page
    for name in (*RECIPES, *ADVANTAGE_NAMES, *LOSS_NAMES, *CORRECTION_NAMES, *LOSS_MEAN_NAMES):
        assert f"\n| `{name}` |" in page, name


def test_the_examples_loss_pulls_a_ratio_back_and_its_advantage_is_of_the_median() -> None:
    file = ROOT / "docs" / "examples" / "own_loss.py"
    algorithm = AlgorithmConfig(loss=f"{file}:loss", advantage=f"{file}:median", correction={"kind": "none"})  # type: ignore[arg-type]
    one = case(0)
    terms, gradient = product(one, algorithm)
    rho = np.exp(one.logp - one.behavior)
    A = one.advantage[:, None]
    expected = one.weight[:, None] * rho * ((rho - 1) / 0.2 * np.abs(A) - A) * one.mask
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    assert terms.clipped.item() == (np.abs(rho - 1) > 0.2)[one.mask].sum()
