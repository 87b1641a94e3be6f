"""Three ledgers side by side: in Python, the same with its SQLite file, and in Lua. A hypothesis state machine.

Same calls, same answers, same books, whatever crashes: the second comes back from its file, Redis from its own dump
without scripts and connections, or all of them without any memory.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import redis
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from broker import calls
from broker.config import BrokerConfig
from broker.heads import BatchHead, is_eval, position_of
from broker.local import LocalBroker
from broker.messages import Frontier, Group, Lease, Member, MemberState, Publication, Rules
from broker.redis_backend import RedisBroker
from broker.store import Store
from tests.broker.views import lasting, outcome, plain

IMPATIENT = BrokerConfig(push_timeout_s=1e-6)  # a full buffer is said at once

small = st.integers(0, 3)
namespaces = itertools.count()


class Durable(LocalBroker):
    """The ledger as the ZeroMQ server has it: what a call has changed is in the file before the call returns."""

    def __init__(self, folder: Path, *, clock: Callable[[], float], token: Callable[[], str]) -> None:
        super().__init__(IMPATIENT, clock=clock, token=token)
        self.store = Store(folder)
        self.store.load(self.ledger, clock())

    def _exchange(self, call: Any, bodies: Any, wait_s: float) -> Any:
        try:
            return super()._exchange(call, bodies, wait_s)
        finally:
            self.store.commit(self.ledger)


class Triplets(RuleBasedStateMachine):
    """Every rule is one call on all three brokers; time stands still but for ``advance``."""

    def __init__(self, url: str, make: Any, folder: Path) -> None:
        super().__init__()
        self.make, self.now, self.fed, self.version, self.incarnation, self.attempt = make, 1000.0, 0, 0, -1, 0
        self.leases: list[Lease] = []
        self.batches: list[BatchHead] = []
        self.url, self.folder, self.lives = url, folder / str(next(namespaces)), 0
        self.crashes = 0
        self.tokens = [itertools.count(), itertools.count(), itertools.count()]
        self.local = LocalBroker(IMPATIENT, clock=self.clock, token=self.token_of(0))
        self.durable_one = self.new_durable()
        self.redis = self.new_redis()

    def clock(self) -> float:
        return self.now

    def token_of(self, which: int) -> Callable[[], str]:
        return lambda: f"sametoke{next(self.tokens[which])}"

    def new_durable(self) -> Durable:
        return Durable(self.folder / str(self.lives), clock=self.clock, token=self.token_of(1))

    def new_redis(self) -> RedisBroker:
        names = {"backend": "redis", "namespace": f"parity{self.folder.name}.{self.lives}"}
        return RedisBroker(IMPATIENT.model_copy(update=names), self.url, clock=self.clock, token=self.token_of(2))

    def all(self, call: Callable[[Any], Any]) -> Any:
        results = [outcome(call, broker) for broker in (self.local, self.durable_one, self.redis)]
        assert plain(results[0]) == plain(results[1])
        assert plain(results[0]) == plain(results[2])
        return None if isinstance(results[0], type) else results[0]

    @rule()
    def crash(self) -> None:
        """Of every broker that keeps its state; then the generators say what they work on, as they do every second."""
        self.crashes += 1
        self.durable_one.store.close()
        self.durable_one = self.new_durable()
        raw = redis.Redis.from_url(self.url)
        raw.script_flush()
        raw.execute_command("DEBUG RELOAD")
        raw.close()
        self.redis.close()
        self.redis = self.new_redis()
        for who in "ab":
            self.report(who, MemberState.SERVING, "", len(self.leases), "x")

    @rule(base=st.integers(0, 6), beyond=st.sets(st.integers(0, 16), max_size=3))
    def amnesia(self, base: int, beyond: set[int]) -> None:
        """Every broker comes back without its memory; the learner opens the run where it is and feeds again."""
        self.lives += 1
        self.local.close()
        self.durable_one.store.close()
        self.redis.close()
        self.local = LocalBroker(IMPATIENT, clock=self.clock, token=self.token_of(0))
        self.durable_one, self.redis = self.new_durable(), self.new_redis()
        self.all(lambda broker: broker.take_batch(version=self.version, wait_s=0))
        self.open(Frontier(base=base, beyond=tuple(sorted(beyond))), self.incarnation - 1, base - 2)
        self.feed(30, 30)

    @initialize(
        eta=st.integers(0, 2),
        size=st.integers(1, 2),
        on_stale=st.sampled_from(["mask", "drop"]),
        room=st.sampled_from([1 << 40, 1 << 40, 900]),
    )
    def start(self, eta: int, size: int, on_stale: str, room: int) -> None:
        self.run_rules = self.make.rules(
            max_buffer_bytes=room,
            max_staleness=eta,
            on_stale=on_stale,
            groups_per_step=size,
            max_attempts=2,
            lease_timeout_s=7.3,
            member_timeout_s=4.1,
        )
        self.open(Frontier())
        self.feed(30, 0)

    def open(self, frontier: Frontier, after: int = -1, unsaved: int = 0) -> None:
        call = functools.partial(
            opening, rules=self.run_rules, version=self.version, frontier=frontier, after=after, unsaved=unsaved
        )
        self.incarnation = self.all(call)
        assert self.incarnation > after

    @rule(back=small, base=st.integers(0, 6), beyond=st.sets(st.integers(0, 16), max_size=3), known=st.integers(-2, 2))
    def restart(self, back: int, base: int, beyond: set[int], known: int) -> None:
        self.version = max(0, self.version - back)
        self.open(Frontier(base=base, beyond=tuple(sorted(beyond))), self.incarnation + known)
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
                self.all(functools.partial(pushing, group=group))
            elif fate == "fail":
                self.all(functools.partial(releasing, lease_id=lease.lease_id, error="broke"))

    @rule(save=st.booleans(), prefetch=st.booleans())
    def step(self, save: bool, prefetch: bool) -> None:
        """What a learner does in one step."""
        self.take_batch(0)
        if prefetch:
            self.take_batch(1)
        due = [batch for batch in self.batches if batch.version == self.version]
        if due:
            self.all(lambda broker: broker.trained(batch_id=due[-1].batch_id, version=self.version + 1))
            self.version = max(self.local.state().version, 0)
        if save:
            self.all(lambda broker: broker.durable(version=self.version))

    @rule(where=st.integers(0, 4))
    def another_run(self, where: int) -> None:
        """The next run with the same names: nothing of this one may come into it."""
        if where == 0:
            self.run_rules = replace(self.run_rules, run=f"run {next(namespaces)}")
            self.version = 0
            self.open(Frontier())
            self.feed(30, 30)

    @rule(count=st.integers(1, 6), back=small)
    def feed(self, count: int, back: int) -> None:
        start = max(0, self.fed - back)
        self.all(lambda broker: broker.feed(self.make.prompts(range(start, start + count))))
        self.fed = max(self.fed, start + count)

    @rule(count=st.integers(1, 3), ahead=st.integers(0, 1))
    def feed_evaluation(self, count: int, ahead: int) -> None:
        prompts = self.make.prompts(range(count), eval_version=self.version + ahead)
        self.all(lambda broker: broker.feed(prompts))

    @rule(count=st.integers(1, 4), behind=st.integers(-2, 2), foreign=st.booleans(), who=st.sampled_from("ab"))
    def lease(self, count: int, behind: int, foreign: bool, who: str) -> None:
        got = self.all(
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
        self.all(lambda broker: broker.push(group))

    @rule(count=st.integers(1, 3), who=st.sampled_from("ab"))
    def lease_twice(self, count: int, who: str) -> None:
        """The answer got lost, so the client sends its call again."""
        call = calls.LeasePrompts(
            member_id=who,
            policy_version=self.version,
            incarnation=self.incarnation,
            max_prompts=count,
            token=f"again{next(namespaces)}",
        )
        first = self.all(lambda broker: broker._call(call))
        again = self.all(lambda broker: broker._call(call))
        assert not first or again == first
        for one in first or ():
            position = position_of(one.item)
            prompt = self.make.prompt(position, eval_version=self.version if is_eval(one.item) else None)
            self.leases.append(
                Lease(lease_id=one.lease_id, prompt=prompt, attempt=one.attempt, incarnation=self.incarnation)
            )

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def push_current(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        self.all(lambda broker: broker.push(self.make.group(lease, [(self.version, 2)])))

    @precondition(lambda self: self.leases)
    @rule(count=st.integers(2, 4), age=st.integers(0, 1), mistaken=st.integers(0, 9))
    def push_together(self, count: int, age: int, mistaken: int) -> None:
        """In one call; seldom one of them is for another item than its lease, and then none is to be taken."""
        groups = [self.make.group(lease, [(max(0, self.version - age), 2)]) for lease in self.leases[-count:]]
        if mistaken == 0:
            last = groups.pop()
            groups.append(replace(last, prompt=self.make.prompt(last.prompt.position + 1)))
        self.all(lambda broker: broker.push_all(groups))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), error=st.sampled_from(["", "broke", "other"]))
    def release(self, data: Any, error: str) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.all(lambda broker: broker.release(lease_id=lease.lease_id, error=error))

    @rule(ahead=st.integers(0, 2))
    def take_batch(self, ahead: int) -> None:
        call = calls.TakeBatch(version=self.version + ahead)
        batch, _ = self.all(lambda broker: broker._call_for_bodies(call)) or (None, ())
        self.batches += [batch] if batch is not None else []

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), index=st.integers(1, 2))
    def spoiled(self, data: Any, index: int) -> None:
        batch = self.batches[-min(index, len(self.batches))]
        call = calls.Spoiled(
            version=batch.version, lease_id=data.draw(st.sampled_from(batch.lease_ids)), error="unreadable"
        )
        self.all(lambda broker: broker._call(call))

    @rule(every=st.booleans(), unknown=st.booleans())
    def requeue(self, every: bool, unknown: bool) -> None:
        dead = [one.item for one in self.local.dead_items()]
        items = dead[: None if every else 1] + (["0", "77"] if unknown else [])
        self.all(lambda broker: broker.requeue(items))

    @precondition(lambda self: self.batches)
    @rule(index=st.integers(1, 3))
    def trained(self, index: int) -> None:
        batch = self.batches[-min(index, len(self.batches))]
        self.all(lambda broker: broker.trained(batch_id=batch.batch_id, version=batch.version + 1))
        self.version = max(self.local.state().version, 0)

    @rule(back=st.integers(-1, 2))
    def durable(self, back: int) -> None:
        self.all(lambda broker: broker.durable(version=self.version - back))

    @rule(
        who=st.sampled_from("ab"),
        state=st.sampled_from(list(MemberState)),
        error=st.sampled_from(["", "lost its device"]),
        renewed=st.integers(0, 3),
        life=st.sampled_from("xxxyz"),
    )
    def report(self, who: str, state: MemberState, error: str, renewed: int, life: str) -> None:
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
            life=f"{life}{self.crashes}",  # a broker that came back does not know who replaced whom
        )
        self.all(lambda broker: broker.report(member))

    @rule(who=st.sampled_from("ab"), error=st.sampled_from(["", "lost its device"]))
    def leave(self, who: str, error: str) -> None:
        self.report(who, MemberState.GONE, error, 0, "x")

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
        self.all(lambda broker: broker.publish(offer))

    @rule(really=st.integers(0, 9))
    def finish(self, really: int) -> None:
        if really == 0:
            self.all(lambda broker: broker.finish("enough"))

    @rule(seconds=st.sampled_from([0.1, 1.7, 4.1, 7.3]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        self.all(lambda broker: broker.dead_items())
        self.all(
            lambda broker: broker._call(
                calls.WorthPushing(size=200, lease_ids=tuple(one.lease_id for one in self.leases[-2:]))
            )
        )
        self.all(lambda broker: broker.publication(after_attempt=0, wait_s=0))
        self.all(lambda broker: broker.eval_results(version=self.version, count=1, wait_s=0))

    @invariant()
    def every_state_agrees(self) -> None:
        states = [broker.state() for broker in (self.local, self.durable_one, self.redis)]
        assert states[0].counts.balanced(), states[0].counts
        assert plain(states[0]) == plain(states[2])
        # Members and revisions are not in the file: members say every second that they are there.
        assert lasting(states[0]) == lasting(states[1])

    def teardown(self) -> None:
        self.look()
        self.local.close()
        self.durable_one.store.close()
        self.redis.close()
        shutil.rmtree(self.folder)


def opening(broker: Any, *, rules: Rules, version: int, frontier: Frontier, after: int, unsaved: int) -> Any:
    return broker.open_run(rules=rules, version=version, frontier=frontier, after=after, unsaved=unsaved)


def pushing(broker: Any, *, group: Group) -> Any:
    return broker.push(group)


def releasing(broker: Any, *, lease_id: str, error: str) -> Any:
    return broker.release(lease_id=lease_id, error=error)
