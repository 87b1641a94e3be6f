"""A whole version by each transport, from the offer to every receiver's report, over a real broker.

learner (a publisher) ──groups | files | the broker──► receivers, each a process      timed by the publisher itself

A shared folder is one of the working directory here; over a network it is as fast as its file server.
"""

from __future__ import annotations

import queue
import statistics
import tempfile
from typing import Any

import torch
from torch import nn

from benchmarks.figures import Figure, spread
from benchmarks.processes import Backend, Running, Worker, running, workers
from benchmarks.sync_wire import TENSORS
from broker.config import BrokerConfig
from broker.connect import connect
from broker.messages import Frontier, Member, MemberState, Rules
from weights_sync.config import WeightsSyncConfig
from weights_sync.publisher import Publisher
from weights_sync.receiver import Receiver
from weights_sync.staging import declare

RECEIVERS = (1, 2)
WAIT_S = 120.0


def transports(quick: bool) -> list[Figure]:
    """MB/s to each receiver, beside the process groups."""
    total, rounds = (16 << 20, 2) if quick else (256 << 20, 5)
    figures: list[Figure] = []
    for count in RECEIVERS:
        collective: float | None = None
        for transport, backend in (("collective", "zmq"), ("disk", "zmq"), ("relay", "zmq"), ("relay", "redis")):
            seconds = _rounds(transport, backend, total, rounds, count)  # type: ignore[arg-type]
            rate = total / statistics.median(seconds) / 1e6
            collective = collective or rate
            figures.append(
                Figure(
                    measure="transports",
                    backend=backend if transport == "relay" else "gloo" if transport == "collective" else "files",
                    name=f"whole by {transport}, {count} receivers",
                    unit="MB/s each",
                    ours=rate,
                    reference=collective,
                    ratio=rate / collective,
                    note=f"{total >> 20} MiB, offer to last report {spread(seconds)} s; reference: collective",
                )
            )
    return figures


def _rounds(transport: str, backend: Backend, total: int, rounds: int, count: int) -> list[float]:
    with running(backend) as broker, tempfile.TemporaryDirectory(dir=".") as folder:
        config = WeightsSyncConfig(transport=transport, dir=folder, sparse=False, sync_timeout_s=WAIT_S)  # type: ignore[arg-type]
        receivers = [Worker(_follow, broker, config, f"g{i}") for i in range(count)]
        learner = Worker(_publish, broker, config, total, rounds, count)
        with workers(*receivers, learner):
            return learner.answer(10 * WAIT_S)


def _publish(broker: Running, config: WeightsSyncConfig, total: int, rounds: int, count: int) -> list[float]:
    torch.set_num_threads(1)
    model = nn.ParameterDict(
        {f"w{i}": nn.Parameter(torch.rand(total // 4 // TENSORS // 1024, 1024)) for i in range(TENSORS)}
    )
    client = connect(broker.config, broker.url)
    client.open_run(rules=_rules(), version=0, frontier=Frontier())
    while len(client.state().members) < count:
        client.state(after_revision=client.state().revision, wait_s=1.0)
    publisher = Publisher(
        config=config,
        connect=lambda: connect(broker.config, broker.url),
        declaration=declare(model),
        incarnation=0,
    )
    seconds: list[float] = []
    for version in range(rounds + 2):  # the first two fill the buffers that are used from then on
        publisher.offer(version, model.named_parameters())
        publisher.flush(WAIT_S)
        seconds.append(publisher.stats.seconds)
    publisher.close()
    client.close()
    return seconds[2:]


def _rules() -> Rules:
    settings = BrokerConfig()
    return Rules(
        max_staleness=1,
        on_stale="mask",
        groups_per_step=4,
        max_attempts=3,
        lease_timeout_s=settings.lease_timeout_s,
        member_timeout_s=WAIT_S,
    )


def _follow(broker: Running, config: WeightsSyncConfig, member_id: str) -> None:
    """Reports every version that it gets, until it is killed."""
    torch.set_num_threads(1)
    client = connect(broker.config, broker.url)
    settled: queue.Queue[tuple[int, str]] = queue.Queue()
    receiver = Receiver(
        config=config,
        member_id=member_id,
        on_settled=lambda *end: settled.put(end),
        check=lambda manifest: None,
        connect=lambda: connect(broker.config, broker.url),
    )

    def report(**changes: Any) -> None:
        fields: dict[str, Any] = {"state": MemberState.SYNCING, "policy_version": -1, "incarnation": -1} | changes
        client.report(Member(member_id=member_id, role="generator", host="127.0.0.1", pid=1, **fields))

    report()
    known = 0
    while True:
        publication = client.publication(after_attempt=known, wait_s=5.0)
        if publication is None or member_id not in publication.receivers:
            continue
        known = publication.attempt
        receiver.receive(publication)
        attempt, error = settled.get(timeout=WAIT_S)
        if error:
            report(error=error)
            continue
        receiver.take(attempt)
        report(state=MemberState.SERVING, policy_version=publication.version, incarnation=publication.incarnation)
