"""Rank 0's side of the broker, over the real ledger in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker.contract import Broker
from broker.errors import RunFinished
from broker.local import LocalBroker
from broker.messages import Batch, Frontier, Group, Member, MemberState, Prompt, Rules
from learners.feed import BatchFeed, EndOfData, NoProgress

Make = dict[str, Callable[..., Any]]
B = 2


def rules(max_staleness: int = 1) -> Rules:
    return Rules(
        max_staleness=max_staleness,
        on_stale="mask",
        groups_per_step=B,
        max_attempts=3,
        lease_timeout_s=30.0,
        member_timeout_s=10.0,
    )


class Bench:
    """A ledger, prompts without end or up to ``total``, a feed, and a generator that answers when asked to."""

    def __init__(self, make: Make) -> None:
        self.make, self.ledger, self.total = make, LocalBroker(), 1_000_000
        self.generator = self.ledger.client()
        self.feeds: list[BatchFeed] = []
        self.now = 0.0
        self.connect: Callable[[], Any] = self.ledger.client

    def forget(self) -> None:
        """The broker starts anew, without its memory."""
        with self.ledger._changed:
            self.ledger.ledger.__init__()  # type: ignore[misc]
            self.ledger._changed.notify_all()

    def prompts(self, frontier: Frontier) -> Iterator[Prompt]:
        for position in range(frontier.base, self.total):
            if not frontier.has(position):
                yield self.make["prompt"](position)

    def open(
        self, *, version: int = 0, frontier: Frontier | None = None, total_steps: int = 100, watchdog_s: float = 30.0,
        max_staleness: int = 1,
    ) -> BatchFeed:  # fmt: skip
        feed = BatchFeed(
            connect=self.connect,
            prompts=self.prompts,
            rules=rules(max_staleness),
            version=version,
            frontier=frontier or Frontier(),
            total_steps=total_steps,
            watchdog_s=watchdog_s,
            clock=lambda: self.now,
        )
        self.feeds.append(feed)
        return feed

    def answer(self, count: int, *, wait_s: float = 5.0) -> list[int]:
        """Answers ``count`` prompts with the learner's version, or as many as are admitted; their positions."""
        positions: list[int] = []
        while len(positions) < count:
            state = self.generator.state()
            leases = self.generator.lease(
                member_id="g",
                policy_version=state.version,
                incarnation=state.incarnation,
                max_prompts=count - len(positions),
                wait_s=wait_s,
            )
            if not leases:
                break
            for lease in leases:
                completions = tuple(self.make["completion"]([state.version] * 2) for _ in range(2))
                self.generator.push(
                    Group(
                        lease_id=lease.lease_id,
                        prompt=lease.prompt,
                        generator="g",
                        incarnation=state.incarnation,
                        completions=completions,
                        failed_completions=0,
                        generation_s=0.0,
                    )
                )
                positions.append(lease.prompt.position)
        return positions

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


@pytest.fixture
def bench(make: Make) -> Iterator[Bench]:
    bench = Bench(make)
    yield bench
    bench.close()


def take(feed: BatchFeed, version: int) -> Batch:
    """The batch, as the loop waits for it."""
    deadline = time.monotonic() + 10.0
    while (batch := feed.take(version, 1.0)) is None:
        assert time.monotonic() < deadline
    return batch


def positions(batch: Batch) -> set[int]:
    return {group.prompt.position for group in batch.groups}


def test_a_batch_is_handed_out_until_it_is_trained_and_the_next_one_is_ready_meanwhile(bench: Bench) -> None:
    feed = bench.open()
    bench.answer(2 * B)
    first = take(feed, 0)
    assert take(feed, 0) is first  # a step that was skipped trains it again
    feed.trained(1)
    second = take(feed, 1)
    assert (first.version, second.version) == (0, 1)
    assert positions(first) | positions(second) == {0, 1, 2, 3}
    assert bench.generator.state().version == 1


def test_the_frontier_holds_what_was_trained_and_durable_follows_it(bench: Bench) -> None:
    feed = bench.open()
    bench.answer(B)
    take(feed, 0)
    assert feed.frontier == Frontier()
    feed.trained(1)
    assert feed.frontier == Frontier(base=B)
    feed.durable(1, feed.frontier)
    assert bench.generator.state().counts.durable == B


def test_the_broker_is_fed_ahead_but_not_without_end(bench: Bench) -> None:
    feed = bench.open()
    bench.answer(B)
    take(feed, 0)
    assert bench.generator.state().counts.fed == 3 * rules().window


def test_no_batch_is_taken_for_the_version_after_the_last_step(bench: Bench) -> None:
    feed = bench.open(total_steps=1)
    bench.answer(2 * B)
    take(feed, 0)
    feed.trained(1)
    assert feed.take(1, 0.2) is None
    assert bench.generator.state().counts.training == 0


def test_c63_a_resumed_run_trains_what_was_generated_but_not_trained(bench: Bench) -> None:
    bench.total = 8
    feed = bench.open()
    bench.answer(2 * B)
    trained = positions(take(feed, 0))
    feed.trained(1)
    frontier = feed.frontier
    feed.close()
    bench.feeds.clear()
    again = bench.open(version=1, frontier=frontier)
    assert again.incarnation == 1
    seen = sorted(trained)
    for version in (1, 2, 3):
        bench.answer(B, wait_s=0.0)
        seen += positions(take(again, version))
        again.trained(version + 1)
    assert sorted(seen) == list(range(8))
    assert bench.generator.state().counts.balanced()


def test_c43_when_the_prompts_end_what_does_not_fill_a_batch_is_left_and_said(bench: Bench) -> None:
    bench.total = 5
    feed = bench.open()
    for version in range(2):
        bench.answer(B)
        take(feed, version)
        feed.trained(version + 1)
    bench.answer(1)
    with pytest.raises(EndOfData, match="1 that do not fill a batch"):
        take(feed, 2)


def test_c42_without_groups_the_learner_ends_and_says_what_the_generators_said(bench: Bench) -> None:
    feed = bench.open(watchdog_s=300.0)
    bench.generator.report(
        Member(
            member_id="gen7",
            role="generator",
            state=MemberState.SERVING,
            policy_version=0,
            incarnation=0,
            host="h",
            pid=1,
            error="CUDA out of memory",
        )
    )
    bench.now += 301.0
    with pytest.raises(NoProgress, match=r"launch\.watchdog_s = 300 .*gen7 serving at version 0 \(CUDA out of memory"):
        feed.take(0, 0.0)


def test_a_group_that_comes_in_is_progress_though_the_batch_is_not_full(bench: Bench) -> None:
    feed = bench.open(watchdog_s=30.0)
    assert feed.take(0, 0.0) is None
    bench.answer(1)
    bench.now += 31.0
    assert feed.take(0, 0.0) is None
    bench.now += 29.0
    assert feed.take(0, 0.0) is None
    bench.now += 2.0
    with pytest.raises(NoProgress, match="1 buffered"):
        feed.take(0, 0.0)


def test_the_end_of_the_run_is_raised_by_take(bench: Bench) -> None:
    feed = bench.open()
    bench.generator.finish("enough")
    with pytest.raises(RunFinished, match="enough"):
        take(feed, 0)


def test_what_ends_the_thread_is_raised_by_take(make: Make) -> None:
    bench = Bench(make)

    def broken(frontier: Frontier) -> Iterator[Prompt]:
        yield make["prompt"](0)
        raise ValueError("row 1 is not UTF-8")

    bench.prompts = broken  # type: ignore[method-assign]
    feed = bench.open()
    with pytest.raises(ValueError, match="row 1"):
        take(feed, 0)
    bench.close()


def test_a_broker_that_lost_its_memory_is_fed_again_and_every_item_is_trained_once(bench: Bench) -> None:
    bench.total = 8
    feed = bench.open()
    seen: list[int] = []
    bench.answer(2 * B)
    seen += positions(take(feed, 0))
    bench.forget()
    feed.trained(1)
    assert feed.take(1, 0.1) is None  # opens the run again
    counts = bench.generator.state().counts
    assert (counts.trained, counts.durable) == (B, 0), "no checkpoint has them yet"
    for version in (1, 2, 3):
        deadline = time.monotonic() + 10.0
        while (batch := feed.take(version, 0.1)) is None:
            assert time.monotonic() < deadline
            bench.answer(B, wait_s=0.0)
        seen += positions(batch)
        feed.trained(version + 1)
    assert sorted(seen) == list(range(8))
    state = bench.generator.state()
    assert (state.version, state.incarnation) == (4, feed.incarnation)
    assert feed.frontier == Frontier(base=8)


def test_a_loss_that_is_noticed_a_second_time_opens_no_further_incarnation(bench: Bench) -> None:
    """Else generators and publisher, who know the first one's number, would wait for ever."""
    bench.total = 12
    feed = bench.open()
    bench.forget()
    seen: list[int] = []
    for version in range(3):
        deadline = time.monotonic() + 10.0
        while (batch := feed.take(version, 0.1)) is None:
            assert time.monotonic() < deadline
            bench.answer(B, wait_s=0.0)
        seen += positions(batch)
        feed._tell(lost=True)  # the feed's own thread, whose answer from the broker without memory came late
        feed.trained(version + 1)
        state = bench.generator.state()
        assert (state.version, state.incarnation) == (version + 1, feed.incarnation)
    assert len(set(seen)) == 3 * B


class Between:
    """A client of the feed's thread with something happening right after one of its calls of ``take_batch``."""

    def __init__(self, client: Broker, happens: Callable[[Batch | None], None]) -> None:
        self._client, self._happens = client, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def take_batch(self, *, version: int, wait_s: float) -> Batch | None:
        batch = self._client.take_batch(version=version, wait_s=wait_s)
        self._happens(batch)
        return batch


def test_a_broker_that_forgets_between_two_calls_is_no_end_of_the_data(bench: Bench) -> None:
    """It has nothing queued, leased or buffered: so has a run whose prompts have ended."""
    bench.total, lost = 2 * B, threading.Event()

    def forget_once(batch: Batch | None) -> None:
        if batch is None and not lost.is_set():
            lost.set()
            bench.forget()

    bench.connect = lambda: Between(bench.ledger.client(), forget_once)
    feed = bench.open()
    assert feed.take(0, 0.2) is None
    assert lost.wait(10.0)
    seen: list[int] = []
    for version in range(2):
        deadline = time.monotonic() + 10.0
        while (batch := feed.take(version, 0.1)) is None:
            assert time.monotonic() < deadline
            bench.answer(B, wait_s=0.0)
        seen += positions(batch)
        feed.trained(version + 1)
    assert sorted(seen) == list(range(2 * B))


def test_a_batch_of_a_broker_that_has_forgotten_it_since_is_not_trained(bench: Bench) -> None:
    """The feed's thread has the answer but does not come to hand it over before the run is opened again."""
    taken, go_on = threading.Event(), threading.Event()

    def dawdle(batch: Batch | None) -> None:
        if batch is not None and batch.version == 1 and not taken.is_set():
            taken.set()
            assert go_on.wait(10.0)

    bench.connect = lambda: Between(bench.ledger.client(), dawdle)
    feed = bench.open()
    bench.answer(2 * B)
    seen = [*positions(take(feed, 0))]
    assert taken.wait(10.0)
    bench.forget()
    feed.trained(1)
    assert feed.take(1, 0.1) is None
    go_on.set()
    deadline = time.monotonic() + 10.0
    while (batch := feed.take(1, 0.1)) is None:
        assert time.monotonic() < deadline
        bench.answer(B, wait_s=0.0)
    seen += positions(batch)
    feed.trained(2)
    assert bench.generator.state().version == 2
    assert len(set(seen)) == 2 * B
