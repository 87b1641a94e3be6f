"""What rank 0 writes down after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from broker.config import RolloutConfig
from broker.local import LocalBroker
from broker.messages import Batch, RunState
from learners.conductor import Conductor
from learners.config import AlgorithmConfig, LearnerConfig
from learners.report import Stopwatch
from learners.stats import StepStats
from telemetry.sink import JsonlSink, read_jsonl
from weights_sync.stats import PublishStats

NUMBERS = dict.fromkeys(
    ("lr", "loss", "grad_norm", "ratio_mean", "ratio_max", "clip_fraction", "kl_behavior", "entropy"), 0.0
)


class Feed:
    """Empty batches, and a broker that has thrown away two groups more at each look."""

    def __init__(self) -> None:
        self._state, self._stale = LocalBroker().state(), 10

    def take(self, version: int, wait_s: float) -> Batch:
        return Batch(batch_id="b", version=version, incarnation=3, groups=(), ended=())

    def trained(self, version: int) -> None:
        """Nothing to book."""

    def look(self) -> RunState:
        self._stale += 2
        return replace(self._state, counts=replace(self._state.counts, events={"stale": self._stale}))


def test_a_step_is_written_with_its_stale_groups_and_told_with_the_brokers_state(tmp_path: Path) -> None:
    told: list[tuple[Mapping[str, object], RunState]] = []
    conductor = Conductor(
        feed=Feed(),  # type: ignore[arg-type]
        publisher=SimpleNamespace(stats=PublishStats(version=7, wire_bytes=5, payload_bytes=50)),  # type: ignore[arg-type]
        evaluation=None,  # type: ignore[arg-type]
        sink=JsonlSink(tmp_path / "metrics.jsonl"),
        rollout=RolloutConfig(),
        algorithm=AlgorithmConfig(),
        config=LearnerConfig(ranks=1),
        flush=lambda: None,
        show=lambda line, state: told.append((line, state)),
    )
    for version in (1, 2):
        assert conductor.next_plan(version - 1)(0.0)
        stats: Any = StepStats(version=version, applied=True, **NUMBERS)
        conductor.stepped(stats, Stopwatch())
    assert [line["sync_wire_bytes"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [5, 5]
    assert [line["stale_groups"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [2, 2]
    assert [line["step"] for line, _ in told] == [1, 2]
    assert told[-1][1].counts.events == {"stale": 16}
