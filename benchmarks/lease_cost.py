"""What a lease costs as the queue grows: it must not depend on how many prompts are waiting.

A ledger for each length of the queue, all alive at once, asked in turns, so that all of them meet the same noise.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from benchmarks.figures import BenchmarkError, Figure, spread
from benchmarks.processes import Backend, Worker, running, workers
from benchmarks.samples import prompts, rules
from broker.config import BrokerConfig
from broker.connect import connect
from broker.contract import Broker
from broker.messages import Frontier

QUEUED = (100, 1_000, 10_000, 100_000)
ANSWER_S = 300.0


def lease_cost(backend: Backend, quick: bool) -> list[Figure]:
    """Microseconds of a lease and of the release that undoes it, at each length of the queue."""
    lengths, rounds, pairs = (QUEUED[:2], 3, 20) if quick else (QUEUED, 30, 100)
    with ExitStack() as stack:
        brokers = [stack.enter_context(running(backend)) for _ in lengths]
        worker = Worker(_ask, [(one.config, one.url) for one in brokers], lengths, rounds, pairs)
        stack.enter_context(workers(worker))
        costs = worker.answer(ANSWER_S)
    reference = statistics.median(costs[0])
    figures = []
    for queued, rows in zip(lengths, costs, strict=True):
        cost = statistics.median(rows)
        # The ratio of a round's two costs, measured one right after the other.
        ratio = statistics.median(a / b for a, b in zip(rows, costs[0], strict=True))
        last = queued == lengths[-1]
        figures.append(
            Figure(
                measure="lease_cost",
                backend=backend,
                name=f"lease + release, {queued:,} queued",
                unit="µs",
                ours=cost,
                reference=reference,
                ratio=ratio,
                target=f"ratio <= 1.5 to {lengths[0]}" if last else "",
                passed=ratio <= 1.5 if last else None,
                note=f"{spread(rows)} over {rounds} rounds of {pairs}",
            )
        )
    return figures


def _ask(
    brokers: list[tuple[BrokerConfig, str]], lengths: tuple[int, ...], rounds: int, pairs: int
) -> list[list[float]]:
    clients = [connect(config, url) for config, url in brokers]
    for client, queued in zip(clients, lengths, strict=True):
        client.open_run(rules=rules(groups_per_step=32, max_staleness=1), version=0, frontier=Frontier())
        client.feed(prompts(range(queued)))
        _pair_us(client, pairs)  # warm
    costs: list[list[float]] = [[] for _ in clients]
    for _ in range(rounds):
        for client, rows in zip(clients, costs, strict=True):
            rows.append(_pair_us(client, pairs))
    for client, queued in zip(clients, lengths, strict=True):
        counts = client.state().counts
        if counts.queued != queued or not counts.balanced():
            raise BenchmarkError(f"{queued} prompts were queued, now: {counts}")
        client.close()
    return costs


def _pair_us(client: Broker, pairs: int) -> float:
    start = time.perf_counter()
    for _ in range(pairs):
        (lease,) = client.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=5.0)
        client.release(lease_id=lease.lease_id, error="")
    return 1e6 * (time.perf_counter() - start) / pairs
