"""The policy under DeepSpeed, in processes of its own, against plain PyTorch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from learners.model import load_model

pytestmark = pytest.mark.slow  # real ranks are started

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learner_ranks", Path(__file__).with_name("ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(model_dir: Path, ranks: ModuleType) -> list[dict[str, Tensor]]:
    """Parameters before and after each of three AdamW steps on the whole batch, without any of our code for it."""
    settings = {name: ranks.OPTIM[name] for name in ("lr", "weight_decay", "eps")}
    return trained(model_dir, ranks, lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), **settings))


def trained(model_dir: Path, ranks: ModuleType, make: Callable[..., torch.optim.Optimizer]) -> list[dict[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = make(model.parameters())
    seen = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for seed in (1, 2, 3):
        rows = ranks.rows(seed)
        total = torch.zeros(())
        for row in rows:
            ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
            P = len(row.prompt_ids)
            table = (model(ids[None]).logits[0, :-1] / ranks.TEMPERATURE).log_softmax(-1)
            logp = table[range(P - 1, len(ids) - 1), ids[P:]]
            weight = (logp.detach() - torch.tensor(row.behavior_logprobs)).exp().clamp(max=2.0)
            rho = (logp - logp.detach()).exp()
            total = total - (weight * rho * row.advantage * torch.tensor(row.loss_mask)).sum()
        optimizer.zero_grad()
        (total / sum(row.loss_tokens for row in rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ranks.OPTIM["max_grad_norm"])
        optimizer.step()
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return seen


@pytest.fixture(scope="module")
def two(run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    run_ranks(
        "exchange+steps+missing+micro_batches+order+bad_gradients+sgd+small_updates+bfloat16",
        world=2,
        directory=directory,
    )
    return directory


@pytest.fixture(scope="module")
def one(run_ranks: Callable[..., None], two: Path) -> Path:
    """The same directory, after one rank has gone on from what two have saved."""
    run_ranks("elsewhere", world=1, directory=two)
    return two


def difference(path: Path, wanted: dict[str, Tensor]) -> float:
    got = load_file(path)
    assert got.keys() == wanted.keys()  # each storage once: no lm_head beside a tied embedding (C12)
    return max((got[name] - wanted[name]).abs().max().item() for name in got)


@pytest.mark.parametrize("stage", STAGES)
def test_c95_two_ranks_at_any_zero_stage_step_as_one_process_does(
    two: Path, plain: list[dict[str, Tensor]], stage: int
) -> None:
    assert difference(two / f"z{stage}-second.safetensors", plain[2]) < 1e-6


@pytest.mark.parametrize("tag", ["z2", "padded", "checkpointing", "padded-checkpointing", "offload"])
def test_c95_many_micro_batches_step_as_one_does(two: Path, plain: list[dict[str, Tensor]], tag: str) -> None:
    assert difference(two / f"many-{tag}.safetensors", plain[2]) < 1e-6


def test_the_step_is_not_trivially_small(plain: list[dict[str, Tensor]]) -> None:
    assert max((plain[2][name] - plain[0][name]).abs().max().item() for name in plain[0]) > 1e-3


def test_c108_the_logged_numbers_depend_on_neither_stage_nor_ranks(two: Path, ranks: ModuleType) -> None:
    stats = json.loads((two / "stats.json").read_text())
    for seed in (1, 2):
        for name, value in stats[f"z0-{seed}"].items():
            for stage in STAGES:
                assert stats[f"z{stage}-{seed}"][name] == pytest.approx(value, rel=1e-4), (name, stage)
    first = stats["z3-1"]
    assert (first["version"], first["applied"], first["lr"]) == (1, 1, ranks.OPTIM["lr"])
    assert first["ratio_max"] > 2.0 > first["ratio_mean"] > 0.0
    assert 0.0 < first["clip_fraction"] < 1.0
    assert first["grad_norm"] > ranks.OPTIM["max_grad_norm"]  # before clipping


@pytest.mark.parametrize("stage", STAGES)
def test_c69_a_step_after_resuming_is_bit_for_bit_the_step_without(two: Path, stage: int) -> None:
    straight = load_file(two / f"z{stage}-third.safetensors")
    resumed = load_file(two / f"z{stage}-resumed.safetensors")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_c69_a_checkpoint_without_any_of_its_parts_is_an_error_and_never_a_fresh_optimizer(two: Path) -> None:
    first, second = (json.loads((two / f"missing-{rank}.json").read_text()) for rank in (0, 1))
    assert "model.safetensors" in first["model.safetensors"]
    assert "optimizer.safetensors is missing" in first["optimizer.safetensors"]
    assert "policy.json cannot be read" in first["policy.json"]
    assert "version 2 with the optimizer's state after 0 steps" in first["fresh"]
    assert "the random numbers of rank 0" in first.pop("rng-00000.safetensors")
    assert second.pop("rng-00000.safetensors") == ""
    assert first == second


@pytest.mark.parametrize("stage", [0, 3])
def test_c71_another_number_of_ranks_at_another_stage_goes_on_with_the_same_optimizer(
    one: Path, plain: list[dict[str, Tensor]], stage: int
) -> None:
    assert difference(one / f"elsewhere-z{stage}.safetensors", plain[3]) < 1e-6


@pytest.mark.parametrize("tag", ["0-float32", "1-float32", "2-float32", "3-float32", "3-bfloat16"])
def test_c99_a_step_without_finite_gradients_on_one_rank_changes_nothing_and_three_in_a_row_end_the_run(
    two: Path, plain: list[dict[str, Tensor]], tag: str
) -> None:
    seen = json.loads((two / "bad.json").read_text())[tag]
    assert (seen["bad"]["applied"], seen["bad"]["version"]) == (0, 1)
    assert [good["version"] for good in seen["good"]] == [1, 2]
    before, after = (load_file(two / f"{name}-{tag}.safetensors") for name in ("before", "after"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    if tag.endswith("float32"):
        assert difference(two / f"next-{tag}.safetensors", plain[2]) < 1e-6
    assert seen["error"].startswith("3 steps in a row")
    assert "learner.max_bad_steps" in seen["error"]


def test_c101_small_updates_computed_in_bfloat16_move_the_float32_weights(two: Path) -> None:
    seen = json.loads((two / "small.json").read_text())
    assert sorted(seen) == ["0", "1", "2", "3"]
    for one in seen.values():
        assert one["dtype"] == "torch.float32"
        assert one["delta"] == pytest.approx(100 * 1e-6, rel=0.05)


def test_a_step_in_bfloat16_is_near_the_one_in_float32_and_not_the_same(two: Path) -> None:
    exact, rounded = json.loads((two / "dtype.json").read_text()).values()
    for name in ("loss", "grad_norm", "entropy", "ratio_mean"):
        assert rounded[name] == pytest.approx(exact[name], rel=0.05, abs=0.01), name
    assert rounded["entropy"] != pytest.approx(exact["entropy"], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sgd_with_momentum_steps_as_torch_does_and_resumes_to_the_bit(
    two: Path, model_dir: Path, ranks: ModuleType, stage: int
) -> None:
    wanted = trained(model_dir, ranks, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))
    assert difference(two / f"sgd-z{stage}-second.safetensors", wanted[2]) < 1e-5
    assert max((wanted[2][name] - wanted[0][name]).abs().max().item() for name in wanted[0]) > 1e-3
    straight, resumed = (load_file(two / f"sgd-z{stage}-{name}.safetensors") for name in ("third", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_c2_all_ranks_call_the_same_collectives_in_the_same_order(two: Path) -> None:
    first, second = (json.loads((two / f"order-{rank}.json").read_text()) for rank in (0, 1))
    assert [call[0] for call in first] == [call[0] for call in second]
    gathers = [(a[1], b[1]) for a, b in zip(first, second, strict=True) if a[0] == "gather"]
    assert len(gathers) > 3 * 4  # several buckets a publication
    assert all(a == b for a, b in gathers)


def test_c100_a_step_with_fewer_sequences_than_ranks_finishes(two: Path, plain: list[dict[str, Tensor]]) -> None:
    assert difference(two / "order-1.safetensors", plain[1]) < 1e-6
    assert (two / "order-3.safetensors").is_file()


def test_c126_the_export_of_a_tied_model_loads_elsewhere_with_equal_logits(two: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(two / "actor", dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    mine = load_model(two / "model", attention="eager", checkpointing=False)
    missing = mine.load_state_dict(load_file(two / "order-3.safetensors"), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits: Any = mine(ids).logits
        assert (loaded(ids).logits - logits).abs().max() < 1e-5


def test_c125_nothing_in_a_checkpoint_is_empty(two: Path) -> None:
    weights, moments = (load_file(two / "saved-z3" / f"{stem}.safetensors") for stem in ("model", "optimizer"))
    shapes = {name: tensor.shape for name, tensor in load_file(two / "model" / "model.safetensors").items()}
    assert {name: tensor.shape for name, tensor in weights.items()} == shapes
    assert {name: tensor.shape for name, tensor in moments.items()} == {
        f"{name}.{key}": shape for name, shape in shapes.items() for key in ("exp_avg", "exp_avg_sq")
    }
    assert all(tensor.any() for tensor in moments.values())


def test_every_rank_gets_the_frames_of_rank_0_and_hears_of_its_end(two: Path) -> None:
    first, second = (json.loads((two / f"exchange-{rank}.json").read_text()) for rank in (0, 1))
    assert first["sizes"] == second["sizes"] == [0, 100, 300_000, (64 << 10) - 9]
    assert first["letters"] == second["letters"] == [[], ["x"], ["y"], ["z"]]
    assert first["error"] == "ValueError: out of frames"
    assert second["error"] == "RootFailed: rank 0: ValueError: out of frames"


def test_c13_an_untied_head_is_sent_beside_the_embedding_and_trained_by_itself(two: Path) -> None:
    before, after = load_file(two / "untied" / "model.safetensors"), load_file(two / "untied-1.safetensors")
    assert after.keys() == before.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert (after["lm_head.weight"] != before["lm_head.weight"]).any()
    assert (after["lm_head.weight"] - after["model.embed_tokens.weight"]).abs().max() > 0.1
