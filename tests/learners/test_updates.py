"""Several optimizer steps a batch, and a KL divergence in the loss and in the reward, against plain PyTorch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learners.config import AlgorithmConfig
from tests.learners.plain_ppo import PlainPpo
from tests.learners.rank_passes import STEPS, parts_of

pytestmark = pytest.mark.slow  # real ranks are started


@pytest.fixture(scope="module")
def ran(run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("updates")
    for world, cases in ((1, "steps"), (2, "steps+reference+bad_updates")):
        run_ranks(cases, world=world, directory=directory, script="rank_passes.py")
    return directory


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Callable[[str], dict[str, Tensor]]:
    """The parameters after the two steps of a case."""

    def stepped(tag: str) -> dict[str, Tensor]:
        algorithm = AlgorithmConfig(**STEPS[tag])
        one = PlainPpo(model_dir, algorithm)
        for seed in (1, 2):
            one.step(*parts_of(algorithm, seed))
        return {name: p.detach() for name, p in one.model.named_parameters()}

    return stepped


def difference(path: Path, wanted: dict[str, Tensor]) -> float:
    got = load_file(path)
    assert got.keys() == wanted.keys()
    return max((got[name] - wanted[name]).abs().max().item() for name in got)


def seen(ran: Path, name: str) -> Any:
    return json.loads((ran / f"{name}.json").read_text())


@pytest.mark.parametrize("tag", STEPS)
def test_c95_steps_are_plain_pytorchs_on_one_rank_and_on_two_in_small_micro_batches(
    ran: Path, plain: Callable[[str], dict[str, Tensor]], tag: str
) -> None:
    wanted = plain(tag)
    for world in (1, 2):
        assert difference(ran / f"{tag}-{world}.safetensors", wanted) < 1e-6, world


def test_c108_the_logged_numbers_depend_on_neither_ranks_nor_micro_batches(ran: Path) -> None:
    one, two = seen(ran, "steps-1"), seen(ran, "steps-2")
    for tag, steps in one.items():
        for step, other in zip(steps, two[tag], strict=True):
            for name in step.keys() - {"micro"}:
                assert other[name] == pytest.approx(step[name], rel=1e-4, abs=1e-7), (tag, name)


def test_a_batch_is_one_version_however_many_optimizer_steps_it_is(ran: Path) -> None:
    for tag, steps in seen(ran, "steps-2").items():
        updates = 4 if STEPS[tag].get("epochs") else 1
        assert [(one["version"], one["updates"], one["skipped_updates"]) for one in steps] == [
            (1, updates, 0),
            (2, updates, 0),
        ]


def test_the_proximal_policy_stays_where_the_batch_began_so_that_the_clip_acts(ran: Path) -> None:
    several, once = (seen(ran, "steps-2")[tag] for tag in ("plain", "recomputed"))
    # The correction's bound holds what it holds at the first optimizer step; all beyond that is the clip's.
    assert several[1]["clip_fraction"] > once[1]["clip_fraction"] + 0.05


def test_a_pass_of_its_own_changes_nothing_where_a_batch_is_one_optimizer_step(
    ran: Path, model_dir: Path, plain: Callable[[str], dict[str, Tensor]]
) -> None:
    assert not AlgorithmConfig().needs_start_logprobs
    one = PlainPpo(model_dir, AlgorithmConfig())
    for seed in (1, 2):
        one.step(*parts_of(AlgorithmConfig(), seed))
    assert difference(ran / "recomputed-2.safetensors", {n: p.detach() for n, p in one.model.named_parameters()}) < 1e-6


@pytest.mark.parametrize("tag", ["kl_loss", "kl_loss_once", "kl_reward", "kl_reward_once"])
def test_the_divergence_from_the_reference_is_told(ran: Path, tag: str) -> None:
    first, second = seen(ran, "steps-1")[tag]
    assert abs(second["kl_reference"]) > 1e-3
    assert AlgorithmConfig(**STEPS[tag]).updates > 1 or abs(first["kl_reference"]) < 1e-6  # the same model at first
    assert "kl_reference" not in seen(ran, "steps-1")["plain"][0]


# -- the reference model ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tag", ["z0", "z3", "offload"])
def test_the_reference_is_bit_for_bit_the_same_after_steps_wherever_it_is_kept(ran: Path, tag: str) -> None:
    told = seen(ran, "reference")
    assert told[f"{tag}-same"] is True
    assert told[tag][1]["kl_reference"] > 1e-4
    assert difference(ran / f"reference-{tag}.safetensors", load_file(ran / "reference-z0.safetensors")) < 1e-6


def test_at_stage_3_a_rank_holds_its_part_of_the_reference(ran: Path) -> None:
    whole = sum(tensor.numel() for tensor in load_file(ran / "reference-z0.safetensors").values())
    assert seen(ran, "reference")["z3-elements"] == pytest.approx(whole / 2, rel=0.01)


def test_without_a_coefficient_there_is_no_reference_and_no_critic(ran: Path) -> None:
    assert seen(ran, "reference")["unused"] is True


def test_the_reference_is_reset_to_the_policy_and_a_checkpoint_has_it(ran: Path) -> None:
    told = seen(ran, "reference")
    assert (told["reset-is-policy"], told["then-not"], told["resumed"]) == (True, False, True)
    assert told["straight"]["kl_reference"] == told["again"]["kl_reference"] > 0
    straight, again = (load_file(ran / f"reference-{name}.safetensors") for name in ("straight", "again"))
    assert all(torch.equal(straight[name], again[name]) for name in straight)


def test_a_checkpoint_without_what_the_run_needs_of_it_is_refused_by_name(ran: Path) -> None:
    told = seen(ran, "reference")
    assert "reference.safetensors is missing" in told["reference-missing"]
    assert "holds no critic" in told["critic-missing"] and "algorithm.critic.enabled" in told["critic-missing"]


# -- gradients that are not finite -----------------------------------------------------------------------------------
def test_c99_an_optimizer_step_without_finite_gradients_is_left_out_and_the_others_count(ran: Path) -> None:
    told = seen(ran, "bad_updates")
    half, whole, none = told["seen"]
    assert (half["version"], half["applied"], half["updates"], half["skipped_updates"]) == (1, 1, 4, 2)
    assert math.isfinite(half["grad_norm"])
    assert (whole["version"], whole["skipped_updates"]) == (2, 0)
    assert (none["version"], none["applied"], none["updates"], none["skipped_updates"]) == (2, 0, 2, 2)
    before, after = load_file(ran / "bad-before.safetensors"), load_file(ran / "bad-after.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert told["error"].startswith("3 steps in a row at version 2") and "learner.max_bad_steps" in told["error"]
