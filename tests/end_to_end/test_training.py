"""A whole run on real parts: its results, its weights, and what happens when parts of it die."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.running import SMALL, Running, child, metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_twenty_steps_with_every_load_verified_and_a_generator_killed_in_between(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    run = start(
        "up", "-c", "quickstart", f"output_dir={tmp_path}", "learner.total_steps=20", "weights_sync.verify_load=always",
        "learner.checkpoint.every_steps=8", "generator.delay_s=0.2", *SMALL,
    )  # fmt: skip
    run.until(lambda: len(metrics(run_dir)) >= 6, 150, "six steps")
    child(run, "gen1").kill()
    assert run.wait(150) == 0, run.text()[-3000:]
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert max(line["staleness_max"] for line in lines) <= 1
    assert "balanced" in run.text() and "NOT balanced" not in run.text()
    assert not run.tree(), "no process is left"
    log = (run_dir / "logs" / "gen0.log").read_text()
    assert "policy version 20 of incarnation 0 is in use" in log
    assert "digest" not in log, "no load was refused"
    for name in ("config.yaml", "reward.png", "checkpoints/step_000020/complete.json", "logs/learner.log"):
        assert (run_dir / name).is_file(), name
    _loads_and_answers(run_dir / "actor")


def _loads_and_answers(actor: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(actor), AutoTokenizer.from_pretrained(actor)
    assert all(parameter.numel() for parameter in model.parameters())
    ids = tokenizer("12", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


@pytest.mark.service
def test_three_launch_scripts_started_by_hand_over_redis_give_the_whole_run(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    common = [
        "-c", "quickstart", f"output_dir={tmp_path}", "learner.total_steps=6", "generator.engine=transformers",
        "broker.backend=redis", *SMALL,
    ]  # fmt: skip
    run_dir, env = (
        tmp_path / "slipstream" / "quickstart",
        {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    broker = start(f"{ROOT}/launch/broker.sh", *common, env=env)
    broker.until(lambda: "redis://" in broker.text(), 30, "the broker's address")
    # On one machine the roles of a run find its broker by themselves: no address, and no password, on any command line.
    learner = start(f"{ROOT}/launch/learner.sh", *common, env=env)
    first = start(f"{ROOT}/launch/generator.sh", *common, "--id", "a", env=env)
    assert learner.wait(180) == 0, learner.text()[-3000:] + first.text()[-2000:]
    assert first.wait(30) == 0, first.text()[-3000:]
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 7))
    assert [f"step {step}/6 " in learner.text() for step in range(1, 7)] == [True] * 6
    assert all((run_dir / name).is_file() for name in ("actor/config.json", "config.yaml", "reward.png"))
    assert "redis://" not in (run_dir / "config.yaml").read_text()
    broker.process.send_signal(signal.SIGTERM)
    assert broker.wait(10) == 143
    assert not broker.tree() and not learner.tree() and not first.tree()


def test_c118_generation_and_training_overlap(start: Callable[..., Running], tmp_path: Path) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    run = start(
        "up", "-c", "quickstart", f"output_dir={tmp_path}", "learner.total_steps=31", "generator.engine=transformers",
        "generator.count=1", "generator.delay_s=1.0", "learner.delay_s=1.0", "learner.ranks=1",
        # η 1 leaves no slack at equal times: whole groups go stale and the learner waits for new ones.
        "generator.groups_in_flight=16", "rollout.max_staleness=2", *SMALL,
    )  # fmt: skip
    assert run.wait(180) == 0, run.text()[-3000:]
    times = [line["time"] for line in metrics(run_dir)]
    assert len(times) == 31
    print(f"30 steps in {times[-1] - times[0]:.1f} s")
    assert times[-1] - times[0] < 36.0, "one after the other would be 60 s"


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(start: Callable[..., Running], tmp_path: Path) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    arguments = (
        "up", "-c", "quickstart", f"output_dir={tmp_path}", "learner.total_steps=12", "generator.engine=transformers",
        "generator.count=1", "learner.checkpoint.every_steps=4", "generator.delay_s=0.3", *SMALL,
    )  # fmt: skip
    first = start(*arguments)
    first.until(lambda: len(metrics(run_dir)) >= 6, 120, "six steps")
    child(first, "learner").send_signal(signal.SIGKILL)
    assert first.wait(30) != 0
    psutil.wait_procs(first.tree(), timeout=10)
    assert not first.tree()
    second = start(*arguments)
    assert second.wait(150) == 0, second.text()[-3000:]
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 13))
    log = (run_dir / "logs" / "learner.log").read_text()
    assert "going on from" in log and "step_000004" in log
    told = [line.split()[1] for line in second.text().splitlines() if line.startswith("step ")]
    assert told == [f"{step}/12" for step in range(5, 13)], "the steps of before are not told again"
    assert "going on from step 4 of 12" in second.text()
    assert "12 of 12, 8 steps in this session" in second.text()
    third = start(*arguments)
    assert third.wait(30) == 0, third.text()
    assert "complete at 12 of 12 steps" in third.text()
