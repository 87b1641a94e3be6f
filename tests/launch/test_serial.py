"""The serial mode: deterministic, bounded, exact over a resume, and equal to a plain loop when on-policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from broker.messages import Prompt
from configs.load import load
from generators.engine import Sample
from generators.hf_engine import HfEngine
from tasks.counting import reward
from tasks.model import load_tokenizer, prepare_model
from tasks.prompts import PromptFeed

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from configs.load import load
from launch.serial import run_serial

counts = run_serial(load("quickstart", sys.argv[1:])).state().counts
print(json.dumps({"fed": counts.fed, "total": counts.total(), "trained": counts.trained, "durable": counts.durable,
                  "events": counts.events}))
"""


def settings_of(directory: Path) -> list[str]:
    """A small serial run in ``directory``."""
    return [
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
    ]


def serial(directory: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs in a process of its own, as DeepSpeed keeps global state; returns the books and the metrics lines."""
    settings = [*settings_of(directory), *overrides]
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
    settings = [*settings_of(half), "learner.total_steps=10", "learner.checkpoint.every_steps=5", *schedule]
    died = subprocess.run(
        [sys.executable, "-c", crash + SCRIPT, *settings], capture_output=True, text=True, timeout=240, check=False
    )
    assert died.returncode == 9, died.stderr[-3000:]
    books, resumed = serial(half, "learner.total_steps=10", *schedule)
    assert weights(half) == weights(tmp_path / "whole")
    for name in ("step", "loss", "lr", "reward_mean"):
        assert [line[name] for line in resumed] == [line[name] for line in whole], name
    assert books["fed"] == books["total"]


def test_c55_on_policy_it_equals_a_plain_synchronous_loop(tmp_path: Path) -> None:
    """The loop below knows no broker, no batch, no DeepSpeed: sample, score, one AdamW step, again."""
    plain = ("algorithm.advantage=grpo", "learner.optim.schedule=constant", "learner.optim.warmup_steps=0")
    overrides = ("learner.total_steps=8", "rollout.max_staleness=0", "algorithm.entropy_coef=0.0", *plain)
    _, lines = serial(tmp_path, *overrides)
    config = load("quickstart", [*settings_of(tmp_path), *overrides])
    directory = prepare_model(config.model, tmp_path / "model", config.seed)
    tokenizer = load_tokenizer(directory)
    feed = PromptFeed(task=config.task, rollout=config.rollout, tokenizer=tokenizer, seed=config.seed)
    engine = HfEngine(
        model_path=str(directory), rollout=config.rollout, config=config.generator, sync=config.weights_sync,
        dtype="float32", seed=config.seed,
    )  # fmt: skip
    engine.load_model()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optim = config.learner.optim
    adam = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    for step, line in enumerate(lines):
        engine.load_weights(step, model.named_parameters())
        loss, rewards = torch.zeros(()), []
        groups = [feed.at(4 * step + i) for i in range(4)]
        answers = [engine.generate_now(prompt, 1) for prompt in groups]
        tokens = sum(len(one.token_ids) for samples in answers for one in samples)
        for prompt, samples in zip(groups, answers, strict=True):
            scores = torch.tensor([_score(tokenizer, prompt, one) for one in samples], dtype=torch.float64)
            rewards += scores.tolist()
            for one, advantage in zip(samples, (scores - scores.mean()) / (scores.std() + 1e-6), strict=True):
                ids = torch.tensor([*prompt.token_ids.tolist(), *one.token_ids.tolist()])
                logp = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
                chosen = logp.gather(-1, torch.tensor(one.token_ids, dtype=torch.long)[:, None])[:, 0]
                weight = (chosen.detach() - torch.tensor(one.behavior_logprobs)).exp().clamp(max=2.0)
                loss = loss - (weight * (chosen - chosen.detach()).exp() * advantage.float()).sum() / tokens
        assert line["reward_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-9), step
        assert line["loss"] == pytest.approx(loss.item(), abs=2e-6), step
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        adam.step()


def _score(tokenizer: Any, prompt: Prompt, sample: Sample) -> float:
    ids = sample.token_ids.tolist()
    text = tokenizer.decode(ids[:-1] if sample.finish_reason == "stop" else ids)
    return reward(prompt.text, text, prompt.reference)
