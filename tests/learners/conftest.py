"""A tiny Qwen2, groups made by hand, and processes for the ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from broker.messages import Batch, Completion, Group, Prompt, Split

HERE = Path(__file__).parent


def write_tiny_model(directory: Path, *, tied: bool = True) -> Path:
    """Hidden 64, two layers, vocabulary of 64; initialised wide enough that gradients are not all alike."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def untied_dir(model_dir: Path) -> Path:
    return write_tiny_model(model_dir.with_name("untied"), tied=False)


@pytest.fixture(scope="session")
def run_ranks(model_dir: Path, untied_dir: Path) -> Callable[..., None]:
    """Runs cases of a script in ``world`` processes, in a directory with the tiny models ``model`` and ``untied``.

    ``dies``: rank 0 is to kill itself with SIGKILL, and the others are killed then.
    """

    def run(
        cases: str, *, world: int, directory: Path, script: str = "ranks.py", timeout_s: float = 120, dies: bool = False
    ) -> None:
        for model in (model_dir, untied_dir):
            if not (directory / model.name).exists():
                (directory / model.name).symlink_to(model)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", HERE / script, cases, str(rank), str(world), str(port), directory],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            if dies:  # rank 0 kills itself, and nothing of the others is to outlive it
                ended = ranks[0].wait(timeout=timeout_s)
                assert ended == -signal.SIGKILL, ranks[0].communicate()[0]
                return
            outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        ended = zip(ranks, outputs, strict=True)
        failed = [f"rank {i}:\n{output}" for i, (rank, output) in enumerate(ended) if rank.returncode]
        assert not failed, "\n".join(failed)

    return run


def make_completion(
    versions: Sequence[int], *, reward: float = 0.0, mask: Sequence[int] | None = None, finish_reason: str = "stop"
) -> Completion:
    """One token per entry of ``versions``, which are the policy versions that sampled them."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return Completion(
        token_ids=np.arange(len(versions), dtype=np.int32) % 60 + 3,
        behavior_logprobs=np.full(len(versions), -4.0, np.float32),
        loss_mask=np.array(mask if mask is not None else [1] * len(versions), np.uint8),
        version_runs=np.array(runs, np.int32).reshape(-1, 2),
        finish_reason=finish_reason,
        reward=reward,
        reward_parts={"exact": reward},
        text="",
    )


def make_prompt(position: int = 0, *, n: int = 2, length: int = 3) -> Prompt:
    return Prompt(
        item=str(position),
        position=position,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.arange(length, dtype=np.int32) + 3,
        text="",
        reference="",
        n=n,
        temperature=1.0,
        max_tokens=8,
        seed=position,
    )


def make_group(completions: Sequence[Completion], *, position: int = 0) -> Group:
    return Group(
        lease_id=f"lease{position}",
        prompt=make_prompt(position, n=len(completions)),
        generator="g",
        incarnation=0,
        completions=tuple(completions),
        failed_completions=0,
        generation_s=0.1,
    )


def make_batch(groups: Sequence[Group], *, version: int) -> Batch:
    return Batch(batch_id=f"0.{version}", version=version, incarnation=0, groups=tuple(groups), ended=())


@pytest.fixture
def make() -> dict[str, Callable[..., object]]:
    """The makers above, for test files that cannot import this one."""
    return {"completion": make_completion, "group": make_group, "batch": make_batch, "prompt": make_prompt}
