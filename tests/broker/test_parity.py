"""The ledger in Python and the ledger in Lua are one machine: same calls, same answers, same books."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.codec import encode
from broker.config import BrokerConfig
from broker.errors import BrokerError
from broker.local import LocalBroker
from broker.messages import Batch, Frontier, Group, Lease, Member, MemberState, Publication, Rules
from broker.redis_backend import RedisBroker

small = st.integers(0, 3)
namespaces = itertools.count()


class Twins(RuleBasedStateMachine):
    """Every rule is one call on both brokers; time stands still but for ``advance``."""

    def __init__(self, url: str, make: Any) -> None:
        super().__init__()
        self.make, self.now, self.fed, self.version, self.incarnation, self.attempt = make, 1000.0, 0, 0, -1, 0
        self.leases: list[Lease] = []
        self.batches: list[Batch] = []
        config = BrokerConfig(backend="redis", namespace=f"parity{next(namespaces)}")
        tokens = (itertools.count(), itertools.count())
        self.local = LocalBroker(clock=lambda: self.now, token=lambda: f"sametoke{next(tokens[0])}")
        self.redis = RedisBroker(config, url, clock=lambda: self.now, token=lambda: f"sametoke{next(tokens[1])}")

    def both(self, call: Callable[[Any], Any]) -> Any:
        results = [outcome(call, broker) for broker in (self.local, self.redis)]
        assert plain(results[0]) == plain(results[1])
        return None if isinstance(results[0], type) else results[0]

    @initialize(eta=st.integers(0, 2), size=st.integers(1, 2), on_stale=st.sampled_from(["mask", "drop"]))
    def start(self, eta: int, size: int, on_stale: str) -> None:
        self.rules = self.make.rules(
            max_staleness=eta,
            on_stale=on_stale,
            groups_per_step=size,
            max_attempts=2,
            lease_timeout_s=7.3,
            member_timeout_s=4.1,
        )
        self.open(Frontier())
        self.feed(30, 0)

    def open(self, frontier: Frontier) -> None:
        call = functools.partial(opening, rules=self.rules, version=self.version, frontier=frontier)
        self.incarnation = self.both(call)

    @rule(back=small, base=st.integers(0, 6), beyond=st.sets(st.integers(0, 16), max_size=3))
    def restart(self, back: int, base: int, beyond: set[int]) -> None:
        self.version = max(0, self.version - back)
        self.open(Frontier(base=base, beyond=tuple(sorted(beyond))))
        self.feed(2, 2)

    @rule(data=st.data(), behind=st.integers(0, 1), count=st.integers(1, 6), who=st.sampled_from("ab"))
    def generate(self, data: Any, behind: int, count: int, who: str) -> None:
        """Leases some and does with each what a generator may do."""
        known = len(self.leases)
        self.lease(count, behind, False, who)
        for lease in self.leases[known:]:
            fate = data.draw(st.sampled_from(["answer", "answer", "answer", "mixed", "old", "old", "fail", "keep"]))
            runs = {
                "answer": [(self.version, 2)],
                "mixed": [(max(0, self.version - 1), 2), (self.version, 1)],
                "old": [(max(0, self.version - 1), data.draw(st.integers(1, 3)))],
            }
            if fate in runs:
                group = self.make.group(lease, runs[fate])
                self.both(functools.partial(pushing, group=group))
            elif fate == "fail":
                self.both(functools.partial(releasing, lease_id=lease.lease_id, error="broke"))

    @rule(save=st.booleans(), prefetch=st.booleans())
    def step(self, save: bool, prefetch: bool) -> None:
        """What a learner does in one step."""
        self.take_batch(0)
        if prefetch:
            self.take_batch(1)
        due = [batch for batch in self.batches if batch.version == self.version]
        if due:
            self.both(lambda broker: broker.trained(batch_id=due[-1].batch_id, version=self.version + 1))
            self.version = max(self.local.state().version, 0)
        if save:
            self.both(lambda broker: broker.durable(version=self.version))

    @rule(count=st.integers(1, 6), back=small)
    def feed(self, count: int, back: int) -> None:
        start = max(0, self.fed - back)
        self.both(lambda broker: broker.feed(self.make.prompts(range(start, start + count))))
        self.fed = max(self.fed, start + count)

    @rule(count=st.integers(1, 3), ahead=st.integers(0, 1))
    def feed_evaluation(self, count: int, ahead: int) -> None:
        prompts = self.make.prompts(range(count), eval_version=self.version + ahead)
        self.both(lambda broker: broker.feed(prompts))

    @rule(count=st.integers(1, 4), behind=st.integers(-2, 2), foreign=st.booleans(), who=st.sampled_from("ab"))
    def lease(self, count: int, behind: int, foreign: bool, who: str) -> None:
        got = self.both(
            lambda broker: broker.lease(
                member_id=who,
                policy_version=self.version - behind,
                incarnation=self.incarnation + (foreign and behind > 0),
                max_prompts=count,
                wait_s=0,
            )
        )
        self.leases += got or ()

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        runs=st.lists(st.tuples(st.integers(-2, 3), st.integers(1, 3)), max_size=2),
        again=st.booleans(),
    )
    def push(self, data: Any, runs: list[tuple[int, int]], again: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        near = [(max(0, self.version - delta), count) for delta, count in runs]
        group = self.make.group(lease, near, incarnation=max(lease.incarnation, self.incarnation - again))
        self.both(lambda broker: broker.push(group))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def push_current(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        self.both(lambda broker: broker.push(self.make.group(lease, [(self.version, 2)])))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), error=st.sampled_from(["", "broke", "other"]))
    def release(self, data: Any, error: str) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.both(lambda broker: broker.release(lease_id=lease.lease_id, error=error))

    @rule(ahead=st.integers(0, 2))
    def take_batch(self, ahead: int) -> None:
        batch = self.both(lambda broker: broker.take_batch(version=self.version + ahead, wait_s=0))
        self.batches += [batch] if batch is not None else []

    @precondition(lambda self: self.batches)
    @rule(index=st.integers(1, 3))
    def trained(self, index: int) -> None:
        batch = self.batches[-min(index, len(self.batches))]
        self.both(lambda broker: broker.trained(batch_id=batch.batch_id, version=batch.version + 1))
        self.version = max(self.local.state().version, 0)

    @rule(back=st.integers(-1, 2))
    def durable(self, back: int) -> None:
        self.both(lambda broker: broker.durable(version=self.version - back))

    @rule(
        who=st.sampled_from("ab"),
        state=st.sampled_from(list(MemberState)),
        error=st.sampled_from(["", "lost its device"]),
        renewed=st.integers(0, 3),
    )
    def report(self, who: str, state: MemberState, error: str, renewed: int) -> None:
        leases = tuple(lease.lease_id for lease in self.leases[-renewed:]) if renewed else ()
        member = Member(
            member_id=who,
            role="generator",
            state=state,
            policy_version=self.version,
            incarnation=self.incarnation,
            host="h",
            pid=1,
            leases=leases,
            error=error,
        )
        self.both(lambda broker: broker.report(member))

    @rule(who=st.sampled_from("ab"), error=st.sampled_from(["", "lost its device"]))
    def leave(self, who: str, error: str) -> None:
        self.report(who, MemberState.GONE, error, 0)

    @rule(step=st.integers(0, 1), foreign=st.booleans())
    def publish(self, step: int, foreign: bool) -> None:
        self.attempt += step
        offer = Publication(
            version=self.version,
            incarnation=self.incarnation - (foreign and step == 0),
            attempt=self.attempt,
            epoch=1,
            store="s:1",
            receivers=("a",),
        )
        self.both(lambda broker: broker.publish(offer))

    @rule(really=st.integers(0, 9))
    def finish(self, really: int) -> None:
        if really == 0:
            self.both(lambda broker: broker.finish("enough"))

    @rule(seconds=st.sampled_from([0.1, 1.7, 4.1, 7.3]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_look_agrees(self) -> None:
        state = self.both(lambda broker: broker.state())
        assert state.counts.balanced(), state.counts
        self.both(lambda broker: broker.publication(after_attempt=0, wait_s=0))
        self.both(lambda broker: broker.eval_results(version=self.version, count=1, wait_s=0))

    def teardown(self) -> None:
        self.local.close()
        self.redis.close()


def opening(broker: Any, *, rules: Rules, version: int, frontier: Frontier) -> Any:
    return broker.open_run(rules=rules, version=version, frontier=frontier)


def pushing(broker: Any, *, group: Group) -> Any:
    return broker.push(group)


def releasing(broker: Any, *, lease_id: str, error: str) -> Any:
    return broker.release(lease_id=lease_id, error=error)


def outcome(call: Callable[[Any], Any], broker: Any) -> Any:
    try:
        return call(broker)
    except BrokerError as error:
        return type(error)


def plain(result: Any) -> Any:
    """Something that compares, which messages with arrays do not."""
    if isinstance(result, Batch | Group | Lease):
        return encode(result)
    return [plain(one) for one in result] if isinstance(result, tuple) else result


@pytest.mark.service
def test_the_lua_ledger_does_what_the_python_ledger_does(redis_server: Any, make: Any) -> None:
    run_state_machine_as_test(
        lambda: Twins(redis_server.url, make),
        settings=settings(
            max_examples=100,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
