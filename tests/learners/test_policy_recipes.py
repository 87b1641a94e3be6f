"""A step of every recipe under ZeRO-3 against plain PyTorch and the formulas of formulas.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from learners.config import AlgorithmConfig
from learners.recipes import RECIPES
from tests.learners import ranks
from tests.learners.formulas import Case, differences, step_loss

pytestmark = pytest.mark.slow  # real ranks are started


@pytest.fixture(scope="module")
def stepped(run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recipes")
    for world in (1, 2):
        run_ranks("recipes", world=world, directory=directory)
    return directory


def plain(model_dir: Path, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """The parameters after one AdamW step whose gradient by the log-probabilities is the formulas' by differences."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = ranks.recipe_rows()
    logps = []
    for row in rows:
        ids, P = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()]), len(row.prompt_ids)
        table = (model(ids[None]).logits[0, :-1] / ranks.TEMPERATURE).log_softmax(-1)
        logps.append(table[range(P - 1, len(ids) - 1), ids[P:]])
    T = max(len(one) for one in logps)

    def wide(values: list[np.ndarray]) -> np.ndarray:  # type: ignore[type-arg]
        return np.stack([np.pad(np.asarray(one, np.float64), (0, T - len(one))) for one in values])

    logp, behavior = wide([one.detach().numpy() for one in logps]), wide([row.behavior_logprobs for row in rows])
    age = wide([row.staleness for row in rows])
    alpha = np.where(age > 0, (age - 1) / np.maximum(age, 1), 0.0)
    one = Case(
        logp=logp,
        proximal=behavior + alpha * (logp - behavior) if algorithm.proximal == "interpolated" else logp,
        behavior=behavior,
        reference=logp,
        entropy=np.zeros_like(logp),
        mask=wide([row.loss_mask for row in rows]) > 0,
        advantage=np.array([row.advantage for row in rows]),
        weight=np.array([row.weight for row in rows]),
    )
    # A kink at equal policies: with the ratio at 1 both sides of the clip agree, so a small step sees neither bound.
    gradient = differences(lambda at: step_loss(one, algorithm, at), logp)
    total = sum((torch.tensor(gradient[b, : len(mine)]).float() * mine).sum() for b, mine in enumerate(logps))
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), **{name: ranks.OPTIM[name] for name in ("lr", "weight_decay", "eps")}
    )
    total.backward()  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_(model.parameters(), ranks.OPTIM["max_grad_norm"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    assert max((after[name] - before[name]).abs().max().item() for name in after) > 1e-3
    return after


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "ppo"])  # test_critic.py has it
def test_c95_c108_a_step_is_the_formulas_on_one_rank_and_on_two_in_small_micro_batches(
    stepped: Path, model_dir: Path, recipe: str
) -> None:
    wanted = plain(model_dir, AlgorithmConfig(recipe=recipe))  # type: ignore[arg-type]
    for world in (1, 2):
        got = load_file(stepped / f"{recipe}-{world}.safetensors")
        assert max((got[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-6, world
