"""A thousand generators on one broker: how long a lease takes, and whether the staleness bound holds.

    generator: lease one prompt ─► 'generate' (sleep, with heartbeats) ─► push ─► lease …     a thread and a client each
    learner:   take_batch ─► check every token ─► trained ─► feed (─► durable)                a process

Every lease waits for nothing but the broker, by construction: the learner keeps more prompts queued than there are
generators, and the window has room for every generator's lease and two batches more. A broker too slow for that load
breaks the construction (groups pile up, the window fills, leases wait): then the latencies say so, as they should.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from benchmarks.figures import BenchmarkError, Figure, percentile
from benchmarks.processes import Backend, Counters, Running, Worker, cores, running, workers
from benchmarks.samples import answer, group, prompts, rules, sampled_by
from broker import rules as staleness
from broker.connect import connect
from broker.contract import Broker, PushOutcome
from broker.errors import RunFinished
from broker.messages import Batch, Frontier, Member, MemberState

T = TypeVar("T")
SMALL = group(completions=2, tokens=16)

PROCESSES = 4
MAX_STALENESS = 15
STEPS_PER_CHECKPOINT = 4
HEARTBEAT_S, WAIT_S = 1.0, 10.0
THREAD_STACK_BYTES = 512 << 10
VERSION, MEASURING, STOP = 0, 1, 2  # indices of counters, written by the learner, the benchmark and the benchmark


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many generators, how long they generate, and how long all is measured (after a ramp of one generation)."""

    generators: int
    generation_s: float
    measure_s: float

    @property
    def groups_per_step(self) -> int:
        """B: two steps a second at the rate that the generators can reach."""
        return max(1, int(self.generators / self.generation_s / 2))

    @property
    def window(self) -> int:
        """(η + 1) · B."""
        return (MAX_STALENESS + 1) * self.groups_per_step

    @property
    def fed_ahead(self) -> int:
        """Prompts fed and not in a batch: those leased, two batches buffered, and as many as generators queued."""
        return 2 * self.generators + 2 * self.groups_per_step


@dataclass(kw_only=True)
class Seen:
    """What some generators have seen while it was measured; latencies in milliseconds."""

    leases: list[float] = field(default_factory=list)
    pushes: list[float] = field(default_factory=list)
    reports: list[float] = field(default_factory=list)
    starved: int = 0
    errors: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, other: Seen) -> None:
        """Takes in what others have seen."""
        for mine, theirs in ((self.leases, other.leases), (self.pushes, other.pushes), (self.reports, other.reports)):
            mine.extend(theirs)
        self.errors.extend(other.errors)
        self.starved += other.starved
        self.cpu_s += other.cpu_s


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What the learner has found."""

    steps: int
    tokens: int
    masked: int
    violations: int
    events: dict[str, int]
    balanced: bool


def many_generators(backend: Backend, quick: bool) -> list[Figure]:
    """Latencies, errors and the staleness bound under a thousand generators."""
    load = (
        Load(generators=40, generation_s=0.5, measure_s=2.0)
        if quick
        else Load(generators=1000, generation_s=5.0, measure_s=30.0)
    )
    if load.window < load.generators + 2 * load.groups_per_step:
        raise BenchmarkError(f"a window of {load.window} is too small for {load.generators} generators")
    counters, seen = Counters(3), Seen()
    with running(backend) as broker:
        learner = Worker(_learn, broker, load, counters)
        each = load.generators // PROCESSES
        crowds = [Worker(_crowd, broker, load, counters, i * each, each) for i in range(PROCESSES)]
        with workers(learner, *crowds):
            time.sleep(2.5 * load.generation_s)  # the ramp, and one generation more
            server, start = psutil.Process(broker.pid), time.monotonic()
            server_s = sum(server.cpu_times()[:2])
            counters[MEASURING] = 1
            time.sleep(load.measure_s)
            counters[MEASURING] = 0
            seconds, server_s = time.monotonic() - start, sum(server.cpu_times()[:2]) - server_s
            counters[STOP] = 1
            learned = learner.answer(3 * WAIT_S)
            for crowd in crowds:
                seen.add(crowd.answer(3 * WAIT_S + 2 * load.generation_s))
    return _figures(backend, load, seen, learned, seconds, server_s)


def _figures(
    backend: Backend, load: Load, seen: Seen, learned: Learned, seconds: float, server_s: float
) -> list[Figure]:
    def figure(
        name: str, unit: str, ours: float, target: str = "", passed: bool | None = None, note: str = ""
    ) -> Figure:
        return Figure(
            measure="generators",
            backend=backend,
            name=name,
            unit=unit,
            ours=ours,
            target=target,
            passed=passed,
            note=note,
        )

    def latency(name: str, values: list[float], limit_ms: float | None) -> Figure:
        p50, p99, worst = percentile(values, 0.5), percentile(values, 0.99), max(values)
        return figure(
            f"{name}, p99",
            "ms",
            p99,
            f"< {limit_ms:g} ms" if limit_ms else "",
            p99 < limit_ms if limit_ms else None,
            f"p50 {p50:.2f} p99 {p99:.2f} max {worst:.1f} ms, {len(values):,} calls",
        )

    wanted, rate = load.generators / load.generation_s, len(seen.pushes) / seconds
    bad = {name: count for name, count in learned.events.items() if name in ("expired", "members_lost", "malformed")}
    failures = len(seen.errors) + seen.starved + sum(bad.values()) + (not learned.balanced)
    told = (
        f"{len(seen.errors)} raised, {seen.starved} leases without a prompt after {WAIT_S:g} s, {bad or 'nothing'} lost"
    )
    told += "" if learned.balanced else ", the books do not balance"
    share = 100 / seconds / cores()
    cpu = f"server {share * server_s:.0f} %, generators {share * seen.cpu_s:.0f} % of {cores()} cores"
    settings = f"{load.generators} generators, B {load.groups_per_step}, η {MAX_STALENESS}, window {load.window}"
    tokens = f"{learned.tokens:,} tokens, {learned.masked:,} masked, {learned.steps} steps, events {learned.events}"
    return [
        figure("errors", "", failures, "0", failures == 0, "; ".join([told, *seen.errors[:2]])),
        figure("throughput", "groups/s", rate, f">= {0.9 * wanted:g}", rate >= 0.9 * wanted, settings),
        latency("lease", seen.leases, 50.0),
        latency("push", seen.pushes, None),
        latency("report (heartbeat)", seen.reports, None),
        figure("tokens beyond the staleness bound", "", learned.violations, "0", learned.violations == 0, tokens),
        figure("processor time of the load itself", "% of the cores", share * seen.cpu_s, note=cpu),
    ]


# -- the generators --------------------------------------------------------------------------------------------
def _crowd(broker: Running, load: Load, counters: Counters, first: int, count: int) -> Seen:
    """Some of the generators: a thread each, as a client belongs to one thread; sleeping threads cost nothing."""
    threading.stack_size(THREAD_STACK_BYTES)
    sights = [Seen() for _ in range(count)]
    threads = [
        threading.Thread(target=_generate, args=(broker, load, counters, first + i, sights[i]), daemon=True)
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    while not counters[MEASURING] and not counters[STOP]:
        time.sleep(0.02)
    spent = time.process_time()
    while not counters[STOP]:
        time.sleep(0.02)
    spent, until = time.process_time() - spent, time.monotonic() + 2 * WAIT_S
    total = Seen()
    for thread, one in zip(threads, sights, strict=True):
        thread.join(max(0.0, until - time.monotonic()))
        total.add(one)
        if thread.is_alive():
            total.errors.append(f"{thread.name} hangs")
    total.cpu_s = spent
    return total


def _generate(broker: Running, load: Load, counters: Counters, index: int, seen: Seen) -> None:
    """One generator's life; an error ends it and is counted."""
    chance, client = random.Random(index), connect(broker.config, broker.url)
    try:
        _pause(chance.uniform(0, load.generation_s), counters)  # they do not all start at once
        while not counters[STOP]:
            _answer_one(client, load, counters, f"generator-{index}", chance, seen)
        client.close()
    except RunFinished:
        client.close()
    except Exception as error:
        seen.errors.append(f"generator {index}: {error!r}")


def _answer_one(client: Broker, load: Load, counters: Counters, name: str, chance: random.Random, seen: Seen) -> None:
    held = counters[VERSION]
    _report(client, counters, name, (), seen)
    leases = _timed(
        lambda: client.lease(member_id=name, policy_version=held, incarnation=0, max_prompts=1, wait_s=WAIT_S),
        seen.leases,
        counters,
    )
    if not leases:
        seen.starved += 1
        return
    (lease,) = leases
    left = load.generation_s * chance.uniform(0.5, 1.5)
    while left > 0 and not counters[STOP]:
        _pause(min(left, HEARTBEAT_S), counters)
        left -= HEARTBEAT_S
        if left > 0:
            _report(client, counters, name, (lease.lease_id,), seen)
    if counters[STOP]:
        return
    done = sampled_by(SMALL, held, counters[VERSION])  # new weights arrived half-way
    outcome = _timed(lambda: client.push(answer(done, lease)), seen.pushes, counters)
    if outcome is not PushOutcome.ACCEPTED:
        seen.errors.append(f"{name}: {outcome.value}")


def _report(client: Broker, counters: Counters, name: str, leases: tuple[str, ...], seen: Seen) -> None:
    member = Member(
        member_id=name,
        role="generator",
        state=MemberState.SERVING,
        policy_version=counters[VERSION],
        incarnation=0,
        host="here",
        pid=1,
        leases=leases,
        stats={"tokens_per_s": 6.4},
    )
    _timed(lambda: client.report(member), seen.reports, counters)


def _timed(call: Callable[[], T], latencies_ms: list[float], counters: Counters) -> T:
    """The call's answer; how long it took is kept if it began while it is measured."""
    measuring, start = counters[MEASURING], time.perf_counter()
    value = call()
    if measuring:
        latencies_ms.append(1e3 * (time.perf_counter() - start))
    return value


def _pause(seconds: float, counters: Counters) -> None:
    if not counters[STOP]:
        time.sleep(seconds)


# -- the learner -----------------------------------------------------------------------------------------------
def _learn(running_: Running, load: Load, counters: Counters) -> Learned:
    broker = connect(running_.config, running_.url)
    size = load.groups_per_step
    broker.open_run(rules=rules(groups_per_step=size, max_staleness=MAX_STALENESS), version=0, frontier=Frontier())
    broker.feed(prompts(range(load.fed_ahead)))
    version, fed, tokens, masked, violations = 0, load.fed_ahead, 0, 0, 0
    patience = time.monotonic() + 3 * load.generation_s + WAIT_S
    while not counters[STOP]:
        batch = broker.take_batch(version=version, wait_s=0.5)
        if batch is None:
            if time.monotonic() > patience:
                raise BenchmarkError(f"no batch for version {version}: {broker.state().counts}")
            continue
        patience = time.monotonic() + 3 * load.generation_s + WAIT_S
        found = _check(batch)
        tokens, masked, violations = tokens + found[0], masked + found[1], violations + found[2]
        version += 1
        broker.trained(batch_id=batch.batch_id, version=version)
        counters[VERSION] = version
        broker.feed(prompts(range(fed, fed + size)))
        fed += size
        if version % STEPS_PER_CHECKPOINT == 0:
            broker.durable(version=version)
    state = broker.state()
    broker.finish("measured")
    broker.close()
    return Learned(
        steps=version,
        tokens=tokens,
        masked=masked,
        violations=violations,
        events=state.counts.events,
        balanced=state.counts.balanced(),
    )


def _check(batch: Batch) -> tuple[int, int, int]:
    """Tokens, those that the rule masks, and those that break it.

    The learner masks what is older than v - η, so it may be in a batch, but only in a group that has something left;
    the broker must never hand out a group with nothing left, nor a token that is newer than the learner.
    """
    tokens = masked = violations = 0
    for one in batch.groups:
        by_version = one.tokens_per_version()
        total = sum(by_version.values())
        left = staleness.tokens_left(by_version, version=batch.version, max_staleness=MAX_STALENESS)
        newer = sum(count for version, count in by_version.items() if version > batch.version)
        tokens, masked = tokens + total, masked + total - left
        violations += newer + (total if left == 0 else 0)
    return tokens, masked, violations
