"""What is told of a step: its times, and what the broker threw away meanwhile."""

from __future__ import annotations

import pytest

from broker.messages import Counts
from learners.report import StaleGroups, Stopwatch


def books(**events: int) -> Counts:
    return Counts(
        fed=0, queued=0, leased=0, buffered=0, training=0, trained=0, durable=0, filtered={}, dead={}, events=events
    )


def test_a_step_has_the_groups_that_became_stale_since_the_one_before() -> None:
    stale = StaleGroups(books(stale=5, failed=9))
    assert stale.since(books(stale=5, failed=10)) == 0
    assert stale.since(books(stale=7, dropped=1)) == 3
    assert stale.since(books(stale=7, dropped=1)) == 0


def test_a_broker_that_lost_its_memory_counts_stale_groups_from_zero() -> None:
    stale = StaleGroups(books(stale=50))
    assert stale.since(books(stale=2)) == 2
    assert stale.since(books(stale=3)) == 1


def test_an_evaluation_is_timed_apart_from_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 20.0, 21.0, 23.0, 23.5])
    monkeypatch.setattr("learners.report.time.monotonic", lambda: next(clock))
    watch = Stopwatch()
    for part in ("eval", "wait", "train"):
        watch.lap(part)
    assert watch.read() == {"eval_s": 20.0, "wait_s": 1.0, "train_s": 2.0, "step_s": 3.0}
    watch.lap("wait")
    assert watch.read() == {"wait_s": 0.5, "step_s": 0.5}
