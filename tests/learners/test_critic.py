"""PPO's critic: GAE and the value loss against numpy, and whole steps against plain PyTorch on one rank and on two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learners.config import AlgorithmConfig
from learners.critic import value_loss, with_value_head
from learners.gae import gae, token_rewards
from learners.model import load_model
from tests.learners.plain_ppo import PlainPpo, gae_sums
from tests.learners.rank_passes import CRITICS, parts_of


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.95, 1.0)])
def test_gae_is_the_sum_of_its_definition_over_the_tokens_with_loss(gamma: float, gae_lambda: float) -> None:
    rng = np.random.default_rng(0)
    rewards, values, mask = rng.normal(size=(5, 9)), rng.normal(size=(5, 9)), rng.random((5, 9)) < 0.6
    mask[0], mask[1] = True, False
    spoilt = [np.where(mask, one, 1e9) for one in (rewards, values)]  # what has no loss is nobody's business
    got = gae(*map(torch.tensor, (*spoilt, mask)), gamma=gamma, gae_lambda=gae_lambda)  # type: ignore[arg-type, misc]
    for b in range(5):
        own = mask[b]
        wanted = gae_sums(rewards[b, own], values[b, own], gamma, gae_lambda)
        np.testing.assert_allclose(got[0][b].numpy()[own], wanted, atol=1e-12)
        np.testing.assert_allclose(got[1][b].numpy()[own], wanted + values[b, own], atol=1e-12)
        assert not got[0][b].numpy()[~own].any() and not got[1][b].numpy()[~own].any()


def test_with_lambda_and_gamma_1_the_return_of_every_token_is_the_reward_that_was_left() -> None:
    mask = torch.tensor([[True, True, False, True, False]])
    rewards = token_rewards(torch.tensor([2.0]), mask)
    assert rewards.tolist() == [[0.0, 0.0, 0.0, 2.0, 0.0]]
    _, returns = gae(rewards, torch.tensor([[0.5, -1.0, 7.0, 0.25, 7.0]]), mask, gamma=1.0, gae_lambda=1.0)
    assert returns.tolist() == [[2.0, 2.0, 0.0, 2.0, 0.0]]


def test_a_row_without_loss_has_no_reward() -> None:
    assert not token_rewards(torch.tensor([2.0, 3.0]), torch.tensor([[False, False], [True, True]]))[0].any()


def test_the_value_loss_is_numpys_and_its_gradient_that_of_differences() -> None:
    rng = np.random.default_rng(1)
    value, old, returned = (rng.normal(size=(4, 6)) for _ in range(3))
    mask = rng.random((4, 6)) < 0.7

    def plain(at: np.ndarray[Any, Any]) -> float:
        total = 0.0
        for place in np.argwhere(mask):
            v, o, r = at[tuple(place)], old[tuple(place)], returned[tuple(place)]
            total += max((v - r) ** 2, (min(max(v, o - 0.3), o + 0.3) - r) ** 2) / 2
        return total

    at = torch.tensor(value, requires_grad=True)
    loss, clipped = value_loss(at, torch.tensor(old), torch.tensor(returned), torch.tensor(mask), clip=0.3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(plain(value), rel=1e-12)
    near = np.clip(value, old - 0.3, old + 0.3)
    assert clipped.item() == (((near - returned) ** 2 > (value - returned) ** 2) & mask).sum() > 0
    wanted = np.zeros_like(value)
    for place in np.ndindex(*value.shape):
        up, down = value.copy(), value.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        wanted[place] = (plain(up) - plain(down)) / 2e-6
    assert at.grad is not None
    np.testing.assert_allclose(at.grad.numpy(), wanted, atol=1e-6)


def test_a_value_head_is_zero_at_first_one_number_a_position_and_takes_nothing_from_the_embedding(
    model_dir: Path,
) -> None:
    model: Any = load_model(model_dir, attention="sdpa", checkpointing=False)
    before = model.get_input_embeddings().weight.clone()
    with_value_head(model)
    values = model(input_ids=torch.arange(3, 13)[None], use_cache=False, logits_to_keep=4).logits
    assert values.shape == (1, 4, 1) and not values.any()
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert {"lm_head.weight", "lm_head.bias"} <= {name for name, _ in model.named_parameters()}


# -- under ranks -----------------------------------------------------------------------------------------------------
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("critic")
    run_ranks("critics", world=2, directory=directory, script="rank_passes.py")
    run_ranks("critics+critic_elsewhere", world=1, directory=directory, script="rank_passes.py")
    return directory


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> dict[str, tuple[PlainPpo, list[dict[str, float]], list[dict[str, Tensor]]]]:
    """Of each case the model after its steps, what was told of them, and the critic after each."""
    made = {}
    for tag, settings in CRITICS.items():
        algorithm = AlgorithmConfig(**settings)
        one = PlainPpo(model_dir, algorithm, **({"critic_lr": lr} if (lr := algorithm.critic.lr) else {}))
        told, critics = [], []
        for seed in (1, 2):
            told.append(one.step(*parts_of(algorithm, seed)))
            critics.append(critic_of(one))
        made[tag] = (one, told, critics)
    return made


def critic_of(one: PlainPpo) -> dict[str, Tensor]:
    named = {f"model.{name}": p.detach().clone() for name, p in one.backbone.named_parameters()}
    return named | {f"lm_head.{name}": p.detach().clone() for name, p in one.head.named_parameters()}


def difference(path: Path, wanted: dict[str, Tensor]) -> float:
    got = load_file(path)
    assert got.keys() == wanted.keys()
    return max((got[name] - wanted[name]).abs().max().item() for name in got)


def told(ran: Path, world: int) -> Any:
    return json.loads((ran / f"critics-{world}.json").read_text())


@slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tag", CRITICS)
def test_c95_policy_and_critic_step_as_plain_pytorch_does(ran: Path, plain: Any, tag: str, world: int) -> None:
    one, _, critics = plain[tag]
    assert difference(ran / f"{tag}-critic-{world}.safetensors", critics[-1]) < 1e-6
    wanted = {name: p.detach() for name, p in one.model.named_parameters()}
    assert difference(ran / f"{tag}-{world}.safetensors", wanted) < 1e-6


@slow
@pytest.mark.parametrize("tag", CRITICS)
def test_what_is_told_of_the_critic_is_what_numpy_counts(ran: Path, plain: Any, tag: str) -> None:
    for world in (1, 2):
        for mine, wanted in zip(told(ran, world)[tag], plain[tag][1], strict=True):
            for name, value in wanted.items():
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, world)
    first, second = told(ran, 2)[tag]
    assert first["value_explained_variance"] == pytest.approx(0.0, abs=1e-6)  # it says 0 everywhere
    assert second["value_clip_fraction"] > 0 < second["value_loss"]


@slow
def test_in_the_warm_up_the_critic_trains_alone_and_versions_go_on(ran: Path) -> None:
    first, second = told(ran, 2)["ppo_warm"]
    assert [(one["version"], one["applied"], one["updates"]) for one in (first, second)] == [(1, 1, 0), (2, 1, 4)]
    assert first["value_loss"] > 0 == first["grad_norm"] == first["loss"]


@slow
def test_c69_a_step_after_resuming_is_bit_for_bit_the_step_without(ran: Path) -> None:
    for kind in ("third", "third-critic"):
        straight, resumed = (load_file(ran / f"{kind}-{tag}.safetensors") for tag in ("straight", "resumed"))
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@slow
def test_c71_one_rank_goes_on_with_what_two_have_saved(ran: Path) -> None:
    for kind in ("third", "third-critic"):
        straight = load_file(ran / f"{kind}-straight.safetensors")
        assert difference(ran / f"{kind}-elsewhere.safetensors", straight) < 1e-6
