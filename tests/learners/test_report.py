"""What is told of a step: its times, and what the broker threw away meanwhile."""

from __future__ import annotations

import psutil
import pytest

from broker.messages import Counts, Member, MemberState, Rules, RunState
from learners.report import StaleGroups, Stopwatch, fill


def test_the_fill_of_the_buffer_and_the_memory_are_told() -> None:
    rules = Rules(
        max_staleness=1, on_stale="mask", groups_per_step=2, max_attempts=3,
        lease_timeout_s=30.0, member_timeout_s=10.0, max_buffer_bytes=1000,
    )  # fmt: skip
    counts = Counts(
        fed=9, queued=4, leased=3, buffered=2, training=0, trained=0, durable=0, filtered={}, dead={}, events={}
    )
    members = tuple(
        Member(
            member_id=name, role="generator", state=MemberState.SERVING, policy_version=0, incarnation=0,
            host="", pid=1, stats={"rss_bytes": size, "swap_stall_s": stall},
        )
        for name, size, stall in (("a", 5.0, 0.25), ("b", 7.0, 0.125))
    )  # fmt: skip
    told = fill(
        RunState(
            revision=1, incarnation=0, version=0, finished="", rules=rules, counts=counts, members=members,
            publication=None, buffered_bytes=250,
        )
    )  # fmt: skip
    assert (told["queued"], told["leased"], told["buffered"]) == (4, 3, 2)
    assert (told["buffer_bytes"], told["buffer_fill"], told["generator_rss_bytes_max"]) == (250, 0.25, 7.0)
    assert told["sync_stall_s"] == 0.25
    assert psutil.Process().memory_info().rss / 2 < told["rss_bytes"] < psutil.Process().memory_info().rss * 2  # type: ignore[operator]


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
