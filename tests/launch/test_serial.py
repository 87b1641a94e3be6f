"""The serial mode: deterministic, bounded, exact over a resume, and equal to a plain loop when on-policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from configs.load import load
from launch.serial import run_serial

counts = run_serial(load("quickstart", sys.argv[1:])).state().counts
print(json.dumps({"fed": counts.fed, "total": counts.total(), "trained": counts.trained, "durable": counts.durable,
                  "events": counts.events}))
"""


def serial(directory: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs in a process of its own, as DeepSpeed keeps global state; returns the books and the metrics lines."""
    settings = [
        f"output_dir={directory}",
        "experiment=serial",
        "launch.mode=serial",
        "generator.engine=transformers",
        "learner.ranks=1",
        "learner.eval.at_start=false",
        "learner.eval.at_end=false",
        "learner.checkpoint.every_steps=0",
        "rollout.groups_per_step=4",
        "rollout.completions_per_group=4",
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *settings], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (directory / "slipstream" / "serial" / "logs" / "metrics.jsonl").read_text().splitlines()
    return json.loads(done.stdout.splitlines()[-1]), [json.loads(line) for line in lines]


def weights(run: Path) -> bytes:
    """The exported model's bytes."""
    return (run / "slipstream" / "serial" / "actor" / "model.safetensors").read_bytes()


def test_c55_two_runs_of_one_seed_are_equal_and_another_seed_is_not(tmp_path: Path) -> None:
    steps = "learner.total_steps=6"
    books, first = serial(tmp_path / "a", steps)
    _, second = serial(tmp_path / "b", steps)
    _, other = serial(tmp_path / "c", steps, "seed=1")
    assert [line["loss"] for line in first] == [line["loss"] for line in second]
    assert [line["loss"] for line in first] != [line["loss"] for line in other]
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert books["fed"] == books["total"] and books["durable"] == 6 * 4


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_c34_no_trained_token_is_older_than_the_bound_and_no_group_is_thrown_away(tmp_path: Path, eta: int) -> None:
    books, lines = serial(tmp_path, "learner.total_steps=200", f"rollout.max_staleness={eta}")
    oldest = [line["staleness_max"] for line in lines]
    assert len(lines) == 200
    assert max(oldest) == eta, "the window is filled before each step, so the bound is reached and never passed"
    assert all("masked_share" in line for line in lines)
    assert books["events"].get("stale", 0) == 0 and books["events"].get("dropped", 0) == 0
    assert books["fed"] == books["total"]


def test_c69_ten_steps_equal_five_then_a_resume_then_five(tmp_path: Path) -> None:
    schedule = ("learner.optim.schedule=linear", "learner.optim.warmup_steps=3", "rollout.max_staleness=0")
    _, whole = serial(tmp_path / "whole", "learner.total_steps=10", *schedule)
    # Killed without warning in step 8, after the checkpoint of step 5: steps 6 and 7 are done again.
    crash = (
        "import os, learners.conductor as c\n"
        "stepped = c.Conductor.stepped\n"
        "def die(self, stats, watch):\n"
        "    if stats.version == 8: os._exit(9)\n"
        "    stepped(self, stats, watch)\n"
        "c.Conductor.stepped = die\n"
    )
    half = tmp_path / "half"
    settings = [
        f"output_dir={half}", "experiment=serial", "launch.mode=serial", "generator.engine=transformers",
        "learner.ranks=1", "learner.eval.at_start=false", "learner.eval.at_end=false",
        "learner.checkpoint.every_steps=5", "rollout.groups_per_step=4", "rollout.completions_per_group=4",
        "learner.total_steps=10", *schedule,
    ]  # fmt: skip
    died = subprocess.run(
        [sys.executable, "-c", crash + SCRIPT, *settings], capture_output=True, text=True, timeout=240, check=False
    )
    assert died.returncode == 9, died.stderr[-3000:]
    books, resumed = serial(half, "learner.total_steps=10", *schedule)
    assert weights(half) == weights(tmp_path / "whole")
    for name in ("step", "loss", "lr", "reward_mean"):
        assert [line[name] for line in resumed] == [line[name] for line in whole], name
    assert books["fed"] == books["total"]
    missing = next((half / "slipstream" / "serial" / "checkpoints").glob("step_*/model*"), None)
    assert missing is not None
