"""Groups a second through the broker, beside the bare transports, in turns so that both meet the same noise.

    4 x (lease ─► push) ──► broker ──► take_batch ─► feed ─► trained (─► durable)      each box a process

The window never holds anybody up: it is larger than all the prompts that are fed ahead, which bound the memory.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import psutil

from benchmarks.figures import BenchmarkError, Figure, spread
from benchmarks.processes import Backend, Counters, Running, Worker, cores, flush, running, workers
from benchmarks.references import DEPTH, PRODUCERS, SETS_PER_PIPELINE, Meter, push_pull, set_get
from benchmarks.samples import answer, group, prompts, rules, sampled_by
from broker.codec import decode, encode
from broker.config import BrokerConfig
from broker.connect import connect
from broker.contract import Broker
from broker.errors import RunFinished
from broker.messages import Batch, Frontier, Group

GROUPS_PER_STEP, MAX_STALENESS = 32, 63
WINDOW = (MAX_STALENESS + 1) * GROUPS_PER_STEP
PROMPTS_PER_LEASE = SETS_PER_PIPELINE
COMPLETIONS, TOKENS = 8, 1024
STEPS_PER_CHECKPOINT = 8
WAIT_S = 10.0
VERSION = 0  # index of the counter that tells the producers what the learner has published


@dataclass(frozen=True, kw_only=True)
class Ours:
    """One round of ours; CPU time in microseconds a group."""

    rate: float
    server_us: float
    learner_us: float
    producers_us: float = 0.0


def throughput(backend: Backend, quick: bool) -> list[Figure]:
    """Ours against the references, and what of the cores' time goes into encoding and decoding."""
    rounds, warm_s, measure_s = (1, 0.2, 0.5) if quick else (5, 0.7, 3.0)
    payload = encode(_sample())
    ours: list[Ours] = []
    with running("redis") if backend == "redis" else nullcontext() as server:
        references: dict[str, tuple[Callable[[], float], list[float]]] = {}
        if server is not None:
            references["redis-py SET + GET"] = partial(set_get, server.url, payload, warm_s, measure_s), []
        else:
            relayed = partial(push_pull, payload, warm_s, measure_s, relayed=True)
            references["pyzmq relay, two hops"] = relayed, []
            references["pyzmq PUSH-PULL, one hop"] = partial(relayed, relayed=False), []
        for _ in range(rounds):
            with running("zmq") if server is None else nullcontext(server) as broker:
                ours.append(_round(broker, warm_s, measure_s))
            for measure, rates in references.values():
                rates.append(measure())
            if server is not None:
                flush(server.url)
    note = f"{len(payload):,} B a group, B {GROUPS_PER_STEP}, η {MAX_STALENESS}, window {WINDOW}, {DEPTH} fed ahead"
    figures = [_against(backend, name, ours, rates, note) for name, (_, rates) in references.items()]
    return [*figures, _codec_share(backend, ours, payload), *_cpu(backend, ours)]


def _against(backend: Backend, name: str, ours: list[Ours], rates: list[float], note: str) -> Figure:
    """The ratio is the median over the rounds: a round's two rates were measured one right after the other."""
    mine = [one.rate for one in ours]
    ratios = [a / b for a, b in zip(mine, rates, strict=True)]
    ratio = statistics.median(ratios)
    return Figure(
        measure="throughput",
        backend=backend,
        name=f"against {name}",
        unit="groups/s",
        ours=statistics.median(mine),
        reference=statistics.median(rates),
        ratio=ratio,
        target="ratio >= 0.8",
        passed=ratio >= 0.8,
        note=f"ours {spread(mine)} ref {spread(rates)} ratio {spread(ratios)}; {note}",
    )


def _codec_share(backend: Backend, ours: list[Ours], payload: bytes) -> Figure:
    encode_us, decode_us = _codec_us(payload)
    rate = statistics.median(one.rate for one in ours)
    share = 100 * (encode_us + decode_us) * 1e-6 * rate / cores()
    return Figure(
        measure="throughput",
        backend=backend,
        name="share of encode + decode",
        unit="% of the cores",
        ours=share,
        target="< 10 %",
        passed=share < 10,
        note=f"(encode {encode_us:.0f} µs + decode {decode_us:.0f} µs of one group) x groups/s / {cores()} cores",
    )


def _codec_us(payload: bytes) -> tuple[float, float]:
    """Microseconds to encode and to decode one group: the best of several loops, which has least of others' noise."""
    sample, loops = _sample(), 200
    encoding, decoding = [], []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(loops):
            encode(sample)
        middle = time.perf_counter()
        for _ in range(loops):
            decode(payload, Group, max_bytes=len(payload))
        encoding.append((middle - start) / loops)
        decoding.append((time.perf_counter() - middle) / loops)
    return 1e6 * min(encoding), 1e6 * min(decoding)


def _cpu(backend: Backend, ours: list[Ours]) -> list[Figure]:
    """Where the processor time of a group goes; told, without a target."""
    shares = {
        "broker": [one.server_us for one in ours],
        "producers": [one.producers_us for one in ours],
        "learner": [one.learner_us for one in ours],
    }
    return [
        Figure(
            measure="throughput",
            backend=backend,
            name=f"processor time of the {role}",
            unit="µs a group",
            ours=statistics.median(values),
            note=spread(values),
        )
        for role, values in shares.items()
    ]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _sample() -> Group:
    return sampled_by(group(completions=COMPLETIONS, tokens=TOKENS), 0, 1)


def _round(broker: Running, warm_s: float, measure_s: float) -> Ours:
    """In a namespace of its own, as the ledger of the round before may still be there."""
    config, counters = broker.fresh(), Counters(1)
    learner = Worker(_learn, config, broker.url, broker.pid, counters, warm_s, measure_s)
    with workers(learner):
        producers = [Worker(_produce, config, broker.url, index, counters) for index in range(PRODUCERS)]
        with workers(*producers):
            ours = learner.answer(warm_s + measure_s + 6 * WAIT_S)
            spent = [producer.answer(3 * WAIT_S) for producer in producers]
    pushed, seconds = sum(groups for groups, _ in spent), sum(cpu for _, cpu in spent)
    return Ours(
        rate=ours.rate,
        server_us=ours.server_us,
        learner_us=ours.learner_us,
        producers_us=1e6 * seconds / max(1, pushed),
    )


def _learn(
    config: BrokerConfig, url: str, server_pid: int, counters: Counters, warm_s: float, measure_s: float
) -> Ours:
    broker, server = connect(config, url), psutil.Process(server_pid)
    wanted_rules = rules(groups_per_step=GROUPS_PER_STEP, max_staleness=MAX_STALENESS)
    broker.open_run(rules=wanted_rules, version=0, frontier=Frontier())
    batches: queue.Queue[Batch | None] = queue.Queue(maxsize=1)
    threading.Thread(target=_feed, args=(connect(config, url), batches), daemon=True).start()
    meter, version = Meter(warm_s, measure_s), 0
    groups, server_s, own_s, wanted = 0, 0.0, 0.0, True
    while wanted:
        batch = batches.get(timeout=3 * WAIT_S)
        if batch is None:
            raise BenchmarkError(f"no batch within {WAIT_S:g} s: {broker.state().counts}")
        if not meter.started:
            groups, server_s, own_s = 0, _cpu_s(server), time.process_time()
        groups += len(batch.groups)
        wanted = meter.count(len(batch.groups))
        version += 1
        broker.trained(batch_id=batch.batch_id, version=version)
        counters[VERSION] = version
        if version % STEPS_PER_CHECKPOINT == 0:
            broker.durable(version=version)
    server_s, own_s = _cpu_s(server) - server_s, time.process_time() - own_s
    broker.finish("measured")
    counts = broker.state().counts
    broker.close()
    if counts.events or not counts.balanced():
        raise BenchmarkError(f"work was lost on the way: {counts}")
    return Ours(rate=meter.rate(), server_us=1e6 * server_s / groups, learner_us=1e6 * own_s / groups)


def _feed(broker: Broker, batches: queue.Queue[Batch | None]) -> None:
    """As the learner's own feed: beside training, the next batch is taken and prompts are topped up."""
    broker.feed(prompts(range(DEPTH)))
    with contextlib.suppress(RunFinished):
        for version in itertools.count():
            batches.put(batch := broker.take_batch(version=version, wait_s=WAIT_S))
            if batch is None:
                break
            fed = DEPTH + version * GROUPS_PER_STEP
            broker.feed(prompts(range(fed, fed + GROUPS_PER_STEP)))
    broker.close()


def _produce(config: BrokerConfig, url: str, index: int, counters: Counters) -> tuple[int, float]:
    """Groups pushed and CPU seconds spent. Its version runs change with the policy version only."""
    broker, name = connect(config, url), f"producer-{index}"
    pushed, held, sample, start = 0, -1, _sample(), time.process_time()
    try:
        while True:
            if counters[VERSION] != held:
                held = counters[VERSION]
                sample = sampled_by(sample, max(0, held - 1), held)
            leases = broker.lease(
                member_id=name,
                policy_version=held,
                incarnation=0,
                max_prompts=PROMPTS_PER_LEASE,
                wait_s=WAIT_S,
            )
            broker.push_all([answer(sample, lease) for lease in leases])
            pushed += len(leases)
    except RunFinished:
        return pushed, time.process_time() - start
    finally:
        broker.close()
