"""Validation passes over the real ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.local import LocalBroker
from broker.messages import Frontier, Group, Prompt, Rules, Split
from learners.config import EvalConfig
from learners.evaluation import Evaluation
from telemetry.sink import JsonlSink, read_jsonl
from weights_sync.errors import SyncFailed

Make = dict[str, Callable[..., Any]]


class Bench:
    def __init__(self, make: Make, logs: Path) -> None:
        self.make, self.path, self.broker = make, logs / "eval.jsonl", LocalBroker()
        rules = Rules(
            max_staleness=1, on_stale="mask", groups_per_step=2, max_attempts=3, lease_timeout_s=30.0,
            member_timeout_s=10.0,
        )  # fmt: skip
        self.broker.open_run(rules=rules, version=7, frontier=Frontier())
        self.opened: list[Evaluation] = []

    def evaluation(self, *, timeout_s: float = 10.0, flush: Callable[[], None] = lambda: None) -> Evaluation:
        one = Evaluation(
            connect=self.broker.client,
            prompts=self.prompts,
            flush=flush,
            sink=JsonlSink(self.path),
            config=EvalConfig(timeout_s=timeout_s),
        )
        self.opened.append(one)
        return one

    def prompts(self, version: int) -> list[Prompt]:
        return [replace(self.make["prompt"](i, n=1), item=f"eval{version}.{i}", split=Split.EVAL) for i in range(3)]

    def answer(self, count: int) -> None:
        """Answers ``count`` prompts, waiting for them; the reward is the position."""
        while count:
            for lease in self.broker.lease(
                member_id="g", policy_version=7, incarnation=0, max_prompts=count, wait_s=10.0
            ):
                completion = self.make["completion"]([7], reward=float(lease.prompt.position))
                self.broker.push(
                    Group(
                        lease_id=lease.lease_id,
                        prompt=lease.prompt,
                        generator="g",
                        incarnation=0,
                        completions=(completion,),
                        failed_completions=0,
                        generation_s=0.0,
                    )
                )
                count -= 1


@pytest.fixture
def bench(make: Make, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(make, tmp_path)
    yield bench
    for one in bench.opened:
        one.close()


def test_a_pass_ends_with_its_last_answer_and_writes_one_line(bench: Bench) -> None:
    poll = bench.evaluation().start(7)
    assert poll(0.0) is None
    bench.answer(3)
    assert poll(10.0) == b"over"
    (line,) = read_jsonl(bench.path)
    assert line.pop("time")
    assert line == {
        "eval": True, "step": 7, "policy_version": 7, "reward_mean": 1.0, "reward_parts": {"exact": 1.0}, "count": 3,
        "missing": 0,
    }  # fmt: skip


def test_answers_that_do_not_come_in_time_are_counted_as_missing(bench: Bench) -> None:
    poll = bench.evaluation(timeout_s=0.3).start(7)
    bench.answer(1)
    assert poll(10.0) == b"over"
    (line,) = read_jsonl(bench.path)
    assert (line["count"], line["missing"], line["reward_mean"]) == (3, 2, 0.0)


def test_a_publication_that_is_late_does_not_end_the_run(bench: Bench) -> None:
    def flush() -> None:
        raise SyncFailed("gen1 is slow")

    poll = bench.evaluation(flush=flush).start(7)
    bench.answer(3)
    assert poll(10.0) == b"over"


def test_an_error_of_the_pass_is_raised_where_it_is_polled(bench: Bench) -> None:
    def flush() -> None:
        raise ZeroDivisionError("the publisher has ended")

    with pytest.raises(ZeroDivisionError, match="publisher"):
        bench.evaluation(flush=flush).start(7)(10.0)


def test_closing_ends_a_pass_under_way(bench: Bench) -> None:
    evaluation = bench.evaluation(timeout_s=600.0)
    poll = evaluation.start(7)
    evaluation.close()
    assert poll(10.0) == b"over"
