"""What rank 0 writes down after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.config import RolloutConfig
from broker.local import LocalBroker
from broker.messages import Batch, RunState
from learners.conductor import Conductor, Show
from learners.config import AlgorithmConfig, LearnerConfig
from learners.exchange import decode
from learners.report import Stopwatch
from learners.stats import StepStats
from telemetry.sink import JsonlSink, read_jsonl
from tests.learners.conftest import make_batch, make_completion, make_group
from weights_sync.errors import NoReceiver
from weights_sync.stats import PublishStats

_NO_NUMBERS = ("version", "applied", "parts")
NUMBERS = dict.fromkeys((name for name in StepStats.__dataclass_fields__ if name not in _NO_NUMBERS), 0.0)


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


def conductor(
    sink: JsonlSink, feed: Any, publisher: Any, show: Show = lambda line, state: None, **algorithm: Any
) -> Conductor:
    return Conductor(
        feed=feed,
        publisher=publisher,
        evaluation=None,  # type: ignore[arg-type]
        sink=sink,
        rollout=RolloutConfig(),
        algorithm=AlgorithmConfig(**algorithm),
        config=LearnerConfig(ranks=1),
        flush=lambda: None,
        show=show,
    )


def test_who_waits_for_a_batch_hears_that_the_publisher_has_given_up(tmp_path: Path) -> None:
    class Waiting(Feed):
        def take(self, version: int, wait_s: float) -> None:  # type: ignore[override]
            return None

    def check() -> None:
        if given_up:
            raise NoReceiver("no generator took version 3")

    given_up: list[bool] = []
    poll = conductor(JsonlSink(tmp_path / "metrics.jsonl"), Waiting(), SimpleNamespace(check=check)).next_plan(3)
    assert poll(0.0) is None
    given_up.append(True)
    with pytest.raises(NoReceiver, match="version 3"):
        poll(0.0)


def test_a_step_is_written_with_its_stale_groups_and_told_with_the_brokers_state(tmp_path: Path) -> None:
    told: list[tuple[Mapping[str, object], RunState]] = []
    rank_0 = conductor(
        JsonlSink(tmp_path / "metrics.jsonl"),
        Feed(),
        SimpleNamespace(stats=PublishStats(version=7, wire_bytes=5, payload_bytes=50)),
        show=lambda line, state: told.append((line, state)),
    )
    for version in (1, 2):
        assert rank_0.next_plan(version - 1)(0.0)
        stats: Any = StepStats(version=version, applied=True, **NUMBERS)
        rank_0.stepped(stats, Stopwatch())
    assert [line["sync_wire_bytes"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [5, 5]
    assert [line["stale_groups"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [2, 2]
    assert [line["step"] for line, _ in told] == [1, 2]
    assert told[-1][1].counts.events == {"stale": 16}


@pytest.mark.parametrize(("share", "warned"), [(0.1, False), (0.5, True)])
def test_c26_who_rejects_much_is_warned_with_the_gap_of_tokens_and_of_completions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float, warned: bool
) -> None:
    rank_0 = conductor(JsonlSink(tmp_path / "metrics.jsonl"), Feed(), SimpleNamespace(stats=PublishStats()))
    assert rank_0.next_plan(0)(0.0)
    seen = NUMBERS | {"rejected_share": share, "sequence_ratio_max": 3.32, "kl_behavior_k1": -0.012}
    stats: Any = StepStats(version=1, applied=True, **seen)
    rank_0.stepped(stats, Stopwatch())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warned
    assert all(part in told[0] for part in ("50 %", "0.012", "3.32", "algorithm.correction") if warned)
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (line["rejected_share"], line["sequence_ratio_max"], line["kl_behavior_k1"]) == (share, 3.32, -0.012)


def test_the_advantages_of_the_batch_in_hand_are_made_again_when_its_kl_is_known(tmp_path: Path) -> None:
    groups = [make_group([make_completion([0] * 2, reward=reward) for reward in (1.0, 0.0)])]

    class Full(Feed):
        def take(self, version: int, wait_s: float) -> Batch:
            return make_batch(groups, version=version)

    settings = {"advantage": "dr_grpo", "kl_coef": 0.5, "kl_in": "reward"}
    rank_0 = conductor(JsonlSink(tmp_path / "metrics.jsonl"), Full(), SimpleNamespace(), **settings)
    share = decode(rank_0.next_plan(0)(0.0) or b"", 0)
    assert [row.advantage for rows in share.mini_batches[0].micro_batches for row in rows] == [0.5, -0.5]
    frame = rank_0.advantages(np.array([1.0, 0.0]))(0.0)
    assert frame is not None and np.frombuffer(frame, np.float64).tolist() == [0.25, -0.25]


def test_tokens_of_groups_that_are_skipped_are_not_counted_as_trained(tmp_path: Path) -> None:
    groups = [
        make_group([make_completion([0] * 4, reward=1.0), make_completion([0] * 2)], position=0),
        make_group([make_completion([0] * 8, reward=0.4) for _ in range(2)], position=1),
    ]

    class Full(Feed):
        def take(self, version: int, wait_s: float) -> Batch:
            return make_batch(groups, version=version)

    rank_0 = conductor(
        JsonlSink(tmp_path / "metrics.jsonl"), Full(), SimpleNamespace(stats=PublishStats()), recipe="dapo"
    )
    assert rank_0.next_plan(0)(0.0)
    watch, stats = Stopwatch(), StepStats(version=1, applied=True, **NUMBERS)
    watch.lap("train")
    rank_0.stepped(stats, watch)
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (line["trained_tokens"], line["zero_variance_groups"], line["samples"]) == (6, 1, 4)
