"""Whole learners: two ranks, real DeepSpeed, real files; then one that goes on from where those stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from broker.messages import Frontier
from learners.checkpoint import read_checkpoint
from telemetry.sink import read_jsonl

pytestmark = pytest.mark.slow  # real ranks are started

B, N = 4, 4


@pytest.fixture(scope="module")
def begun(run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps by two ranks, in a folder that an earlier run has left lines in."""
    directory = tmp_path_factory.mktemp("whole")
    (directory / "run" / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "eval.jsonl"):  # an earlier run of the same name left its first lines
        (directory / "run" / "logs" / name).write_text(
            json.dumps({"step": 0, "policy_version": 0, "eval": True}) + "\n"
        )
    (directory / "first.json").write_text(json.dumps({"total_steps": 4}))
    run_ranks("first", world=2, directory=directory, script="runs.py")
    return look(directory, "first")


@pytest.fixture(scope="module")
def resumed(run_ranks: Callable[..., None], begun: dict[str, Any]) -> dict[str, Any]:
    """Three more, by one rank. Metrics lines of a step that was never saved are there when it starts."""
    directory: Path = begun["directory"]
    with (directory / "run" / "logs" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "policy_version": 5, "lost": True}) + "\n")
    (directory / "second.json").write_text(json.dumps({"total_steps": 7}))
    run_ranks("second", world=1, directory=directory, script="runs.py")
    return look(directory, "second")


def look(directory: Path, name: str) -> dict[str, Any]:
    run = directory / "run"
    return {
        "directory": directory,
        "metrics": read_jsonl(run / "logs" / "metrics.jsonl"),
        "evals": read_jsonl(run / "logs" / "eval.jsonl"),
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
        "frontier": read_checkpoint(max((run / "checkpoints").iterdir()))[1],
        "actor": load_file(run / "actor" / "model.safetensors"),
        **json.loads((directory / f"{name}-seen.json").read_text()),
    }


def test_a_run_ends_complete_with_its_books_balanced(begun: dict[str, Any]) -> None:
    assert begun["finished"] == "completed"
    counts = begun["counts"]
    assert counts["durable"] == 4 * B
    assert counts["fed"] == begun["total"]
    assert begun["checkpoints"] == ["step_000002", "step_000004"]


def test_every_step_has_one_line_with_every_metric(begun: dict[str, Any]) -> None:
    assert [line["step"] for line in begun["metrics"]] == [1, 2, 3, 4]
    for line in begun["metrics"]:
        assert line["policy_version"] == line["step"]
        assert (line["groups"], line["samples"], line["micro_batches"]) == (B, B * N, 2)
        assert 0 <= line["staleness_max"] <= 1
        assert sum(line["staleness_histogram"].values()) == line["trained_tokens"] > 0
        assert line["reward_parts"]["even"] == pytest.approx(line["reward_mean"])
        assert line["lr"] == 1e-3
        assert line["grad_norm"] > 0
        assert line["entropy"] > 0
        assert line["skipped"] is False
        spent = line["wait_s"] + line["train_s"] + line["publish_s"]
        assert 0 < spent <= line["step_s"]
        assert (line["eval_s"] > 0.01) == (line["step"] in (1, 3)), "the passes at 0 and 2 are before these"
    assert set(begun["metrics"][0]) >= {
        "incarnation", "time", "reward_std", "loss", "ratio_mean", "ratio_max", "clip_fraction", "kl_behavior",
        "kl_behavior_k1", "ess_share", "sequence_ratio_max", "rejected_share",
        "response_length_mean", "truncated_share", "masked_share", "staleness_mean", "train_tokens_per_s",
        "idle_share", "padding_share", "zero_variance_groups", "failed_completions",
        "stale_groups", "eval_s", "queued", "leased", "buffered", "buffer_bytes", "buffer_fill", "rss_bytes",
        "generator_rss_bytes_max",
    }  # fmt: skip


def test_c119_each_evaluation_has_one_version_and_all_its_answers(begun: dict[str, Any]) -> None:
    assert [(line["policy_version"], line["count"], line["missing"]) for line in begun["evals"]] == [
        (0, 5, 0),
        (2, 5, 0),
        (4, 5, 0),
    ]


def test_the_actor_is_the_trained_model(begun: dict[str, Any]) -> None:
    saved = load_file(begun["directory"] / "run" / "checkpoints" / "step_000004" / "model.safetensors")
    initial = load_file(begun["directory"] / "model" / "model.safetensors")
    assert all((begun["actor"][name] == saved[name]).all() for name in saved)
    assert any((begun["actor"][name] != initial[name]).any() for name in initial)


def test_c106_c110_a_resumed_run_goes_on_where_it_was_saved_and_no_step_is_there_twice(
    begun: dict[str, Any], resumed: dict[str, Any]
) -> None:
    assert [line["step"] for line in resumed["metrics"]] == [1, 2, 3, 4, 5, 6, 7]
    assert not any("lost" in line for line in resumed["metrics"])
    assert resumed["metrics"][:4] == begun["metrics"]
    assert [line["policy_version"] for line in resumed["evals"]] == [0, 2, 4, 6, 7]
    assert resumed["checkpoints"] == ["step_000006", "step_000007"]


def test_c64_each_prompt_is_trained_once_over_both_runs(begun: dict[str, Any], resumed: dict[str, Any]) -> None:
    for seen, steps in ((begun, 4), (resumed, 7)):
        frontier: Frontier = seen["frontier"]
        assert frontier.base + len(frontier.beyond) == steps * B
    assert resumed["counts"]["durable"] == 7 * B
    assert resumed["total"] == resumed["counts"]["fed"]


def test_a_run_whose_divergence_acts_on_the_rewards_shares_its_advantages_within_each_step(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    algorithm = {"kl_coef": 0.1, "kl_in": "reward", "epochs": 2, "mini_batches": 2, "reference_reset_steps": 2}
    (tmp_path / "kl.json").write_text(json.dumps({"total_steps": 3, "algorithm": algorithm}))
    run_ranks("kl", world=2, directory=tmp_path, script="runs.py")
    run = look(tmp_path, "kl")
    assert (run["finished"], run["counts"]["durable"]) == ("completed", 3 * B)
    assert [(line["step"], line["updates"]) for line in run["metrics"]] == [(1, 4), (2, 4), (3, 4)]
    assert all(line["kl_reference"] > 0 for line in run["metrics"])
    assert (tmp_path / "run" / "checkpoints" / "step_000003" / "reference.safetensors").is_file()
