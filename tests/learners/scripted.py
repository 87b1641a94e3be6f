"""A learner rank whose batches follow from the data position alone, so that two runs can be compared bit for bit.

``python scripted.py NAME RANK WORLD PORT DIRECTORY`` reads DIRECTORY/NAME.json: ``total_steps``, ``kill_at`` (a version
at which rank 0 kills itself without warning), ``run`` (a folder) and ``learner`` (settings).

The broker decides by arrival which groups make a batch; here a script does: each step takes the first B of a window of
2 B positions that have not ended, in an order drawn from the window, so that positions stay open behind the frontier.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from broker.config import BrokerConfig, RolloutConfig
from broker.local import LocalBroker
from broker.messages import Batch, Frontier, Lease, Prompt, Rules, RunState
from learners.checkpoint import MARKER
from learners.config import AlgorithmConfig, CheckpointConfig, LearnerConfig, OptimConfig
from learners.run import run_rank
from tests.learners.runs import N, Prompts, answered
from weights_sync.config import WeightsSyncConfig

B, EVERY = 3, 5


class ScriptedFeed:
    """learners.feed.BatchFeed with a script in the broker's place."""

    def __init__(
        self,
        *,
        connect: Callable[[], LocalBroker],
        frontier: Frontier,
        rules: Rules,
        version: int,
        kill_at: int,
        saved: Path,
        log: Path,
        **_: Any,
    ) -> None:
        self.frontier, self._kill_at, self._saved = frontier, kill_at, saved
        self._log, self._broker = log, connect()
        self.incarnation = self._broker.open_run(rules=rules, version=version, frontier=frontier)  # to publish in
        self._hand: Batch | None = None

    def take(self, version: int, wait_s: float) -> Batch:
        if version == self._kill_at:
            deadline = time.monotonic() + 20
            while not self._saved.is_file() and time.monotonic() < deadline:  # it is written beside the steps
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        prompts = [prompt for prompt, _ in zip(self._source(), range(2 * B), strict=False)]
        chosen = np.random.default_rng(prompts[0].position).permutation(len(prompts))[:B]
        leases = [Lease(lease_id=str(i), prompt=prompts[i], attempt=1, incarnation=0) for i in chosen]
        groups = tuple(answered(lease, version) for lease in leases)
        self._hand = Batch(batch_id="", version=version, incarnation=0, groups=groups, ended=())
        with self._log.open("a") as file:
            print(version, *(group.prompt.position for group in groups), file=file)
        return self._hand

    def _source(self) -> Iterator[Prompt]:
        return Prompts().from_frontier(self.frontier)

    def trained(self, version: int) -> None:
        assert self._hand is not None
        self.frontier = self.frontier.with_ended([group.prompt.position for group in self._hand.groups])

    def durable(self, version: int, frontier: Frontier) -> None:
        """Nobody to tell."""

    def look(self) -> RunState:
        return self._broker.state()

    def finish(self, reason: str) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to stop."""


def feed_of(given: dict[str, Any], directory: Path, log: Path) -> Callable[..., ScriptedFeed]:
    kill_at = given.get("kill_at", -1)
    last = kill_at // EVERY * EVERY
    saved = directory / given["run"] / "checkpoints" / f"step_{last:06d}" / MARKER
    return lambda **kwargs: ScriptedFeed(kill_at=kill_at, saved=saved, log=log, **kwargs)


def main() -> None:
    name, rank, world, port, directory = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    logging.basicConfig(level="INFO", format="%(message)s", filename=directory / f"{name}-{rank}.log")
    given = json.loads((directory / f"{name}.json").read_text())
    learner: dict[str, Any] = {"ranks": world, "total_steps": given["total_steps"], "collective_timeout_s": 30.0}
    learner["optim"] = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=4, weight_decay=0.01)
    learner["checkpoint"] = CheckpointConfig(every_steps=EVERY, keep=2)
    run_rank(
        model_dir=directory / "model",
        run_dir=directory / given["run"],
        rollout=RolloutConfig(groups_per_step=B, completions_per_group=N, max_staleness=1),
        algorithm=AlgorithmConfig(),
        config=LearnerConfig(**(learner | given.get("learner", {}))),
        weights_sync=WeightsSyncConfig(),
        broker_config=BrokerConfig(),
        broker=LocalBroker().client,
        prompts=Prompts,
        rank=rank,
        world=world,
        store=dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False),
        seed=0,
        watchdog_s=30.0,
        local_rank=rank,
        open_feed=feed_of(given, directory, directory / f"{name}-positions.txt"),
    )


if __name__ == "__main__":
    main()
