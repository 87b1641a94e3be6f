"""A whole learner rank over a ledger in rank 0's process, where a thread answers the prompts at once.

``python runs.py NAME RANK WORLD PORT DIRECTORY`` reads DIRECTORY/NAME.json and writes DIRECTORY/NAME-seen.json.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from broker.config import BrokerConfig, RolloutConfig
from broker.errors import RunFinished
from broker.local import LocalBroker
from broker.messages import Completion, Frontier, Group, Lease, Prompt, Split
from learners.config import AlgorithmConfig, CheckpointConfig, EvalConfig, LearnerConfig, OptimConfig
from learners.run import run_rank
from weights_sync.config import WeightsSyncConfig

N = 4


class Prompts:
    """Prompts of three tokens without end, and five to evaluate on."""

    def from_frontier(self, frontier: Frontier) -> Iterator[Prompt]:
        position = frontier.base
        while True:
            if not frontier.has(position):
                yield self._prompt(str(position), position, Split.TRAIN)
            position += 1

    def eval_prompts(self, version: int) -> list[Prompt]:
        return [self._prompt(f"eval{version}.{i}", i, Split.EVAL) for i in range(5)]

    def _prompt(self, item: str, position: int, split: Split) -> Prompt:
        return Prompt(
            item=item, position=position, epoch=0, split=split, token_ids=np.array([1, 3 + position % 60, 4], np.int32),
            text="", reference="", n=N if split is Split.TRAIN else 1, temperature=1.0, max_tokens=8, seed=position,
        )  # fmt: skip


def generate(broker: LocalBroker) -> None:
    """Answers whatever may be leased under the learner's own version, until the run ends."""
    try:
        while True:
            state = broker.state()
            for lease in broker.lease(
                member_id="g", policy_version=state.version, incarnation=state.incarnation, max_prompts=4, wait_s=0.2
            ):
                broker.push(answered(lease, state.version))
    except RunFinished:
        return


def answered(lease: Lease, version: int) -> Group:
    """Random tokens; the reward is the share of even ones."""
    rng = np.random.default_rng(lease.prompt.seed)
    completions = []
    for _ in range(lease.prompt.n):
        ids = rng.integers(3, 64, int(rng.integers(1, 9))).astype(np.int32)
        reward = float((ids % 2 == 0).mean())
        completions.append(
            Completion(
                token_ids=ids,
                behavior_logprobs=np.full(len(ids), -4.16, np.float32),
                loss_mask=np.ones(len(ids), np.uint8),
                version_runs=np.array([[version, len(ids)]], np.int32),
                finish_reason="length" if len(ids) == 8 else "stop",
                reward=reward,
                reward_parts={"even": reward},
                text="",
            )
        )
    return Group(
        lease_id=lease.lease_id, prompt=lease.prompt, generator="g", incarnation=lease.incarnation,
        completions=tuple(completions), failed_completions=0, generation_s=0.0,
    )  # fmt: skip


def main() -> None:
    name, rank, world, port, directory = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    logging.basicConfig(level="INFO")
    given = json.loads((directory / f"{name}.json").read_text())
    ledger = LocalBroker()
    if rank == 0:
        threading.Thread(target=generate, args=(ledger.client(),), daemon=True).start()
    run_rank(
        model_dir=directory / "model",
        run_dir=directory / "run",
        rollout=RolloutConfig(groups_per_step=4, completions_per_group=N, max_staleness=1),
        algorithm=AlgorithmConfig(**given.get("algorithm", {})),
        config=LearnerConfig(
            ranks=world,
            total_steps=given["total_steps"],
            optim=OptimConfig(lr=1e-3),
            checkpoint=CheckpointConfig(every_steps=2, keep=2),
            eval=EvalConfig(every_steps=2, at_start=True, at_end=True, timeout_s=20.0),
            collective_timeout_s=60.0,
        ),
        weights_sync=WeightsSyncConfig(),
        broker_config=BrokerConfig(),
        broker=ledger.client,
        prompts=Prompts,
        rank=rank,
        world=world,
        store=dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False),
        seed=0,
        watchdog_s=30.0,
        local_rank=rank,
    )
    if rank == 0:
        state = ledger.client().state()
        seen = {"finished": state.finished, "counts": asdict(state.counts), "total": state.counts.total()}
        (directory / f"{name}-seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
