"""A real publisher with receivers in processes of their own: what is said around a payload, and what a death costs."""

from __future__ import annotations

import os
import queue
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.figures import BenchmarkError, Figure, spread
from benchmarks.processes import Running, Worker, running, workers
from benchmarks.samples import rules
from broker.connect import connect
from broker.messages import Frontier, Member, MemberState, Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.publisher import Publisher
from weights_sync.receiver import Receiver
from weights_sync.staging import declare

WAIT_S = 60.0
HEARTBEAT_S, MEMBER_TIMEOUT_S = 0.2, 1.0
TENSORS = (30, 300)


def control(quick: bool) -> list[Figure]:
    """Messages of one publication to one receiver, however many tensors it has."""
    counts = {tensors: _count_messages(tensors) for tensors in TENSORS}
    figures: list[Figure] = []
    for tensors, seen in counts.items():
        total = sum(seen.values())
        figures.append(
            Figure(
                measure="control", backend="gloo", name=f"publication of {tensors} tensors", unit="messages",
                ours=total, target="<= 5", passed=total <= 5,
                note=", ".join(f"{name} {count}" for name, count in sorted(seen.items())),
            )
        )  # fmt: skip
    return figures


def reform(quick: bool) -> list[Figure]:
    """From the moment at which the death is known to the others' holding the version."""
    rounds = 1 if quick else 5
    seconds = [_reform_once() for _ in range(rounds)]
    beyond = statistics.median(seconds)
    return [
        Figure(
            measure="reform", backend="gloo", name="3 receivers to 2, beyond detection", unit="s", ours=beyond,
            target="< 2 s", passed=beyond < 2.0,
            note=f"{spread(seconds)}; detection is the broker's (broker.member_timeout_s = {MEMBER_TIMEOUT_S:g} here)",
        )
    ]  # fmt: skip


def _count_messages(tensors: int) -> Counter[str]:
    """Of the second version, over a group that is there; told by both ends."""
    with running("zmq") as broker:
        receiver = Worker(_follow, broker, "g1", 2)
        learner = Worker(_publish_counted, broker, tensors)
        with workers(receiver, learner):
            seen = Counter(learner.answer(WAIT_S)) + Counter(receiver.answer(WAIT_S))
    return seen


def _publish_counted(broker: Running, tensors: int) -> Counter[str]:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(256)) for i in range(tensors)})
    with _publisher(broker, model) as publisher:
        publisher.offer(0, model.named_parameters())
        publisher.flush(WAIT_S)
        seen = _counting("learner")
        publisher.offer(1, model.named_parameters())
        publisher.flush(WAIT_S)
        seen["learner: publication"] += 1
    return seen


def _counting(who: str) -> Counter[str]:
    """Counts what is set in a store from now on: everything that one side tells the other."""
    seen: Counter[str] = Counter()
    plain = TCPStore.set

    def counted(store: Any, key: str, value: Any) -> None:
        seen[f"{who}: {key.partition('/')[0]}"] += 1
        plain(store, key, value)

    TCPStore.set = counted  # type: ignore[method-assign,assignment]
    return seen


@contextmanager
def _publisher(broker: Running, model: nn.Module) -> Iterator[Publisher]:
    torch.set_num_threads(1)
    client = connect(broker.config, broker.url)
    client.open_run(
        rules=rules(groups_per_step=4, max_staleness=1, member_timeout_s=MEMBER_TIMEOUT_S),
        version=0,
        frontier=Frontier(),
    )
    publisher = Publisher(
        config=WeightsSyncConfig(sparse=False, bucket_bytes=1 << 20),
        connect=lambda: connect(broker.config, broker.url),
        declaration=declare(model),
        incarnation=0,
    )
    try:
        yield publisher
    finally:
        publisher.close()
        client.close()


def _reform_once() -> float:
    with running("zmq") as broker:
        names = ("g1", "g2", "g3")
        receivers = [Worker(_follow, broker, name, 10**9) for name in names]
        with workers(*receivers):
            learner = Worker(_publish_and_kill, broker, receivers[2].pid)
            with workers(learner):
                return learner.answer(2 * WAIT_S)


def _publish_and_kill(broker: Running, victim: int) -> float:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(1 << 20)) for i in range(16)})
    client = connect(broker.config, broker.url)
    with _publisher(broker, model) as publisher:
        _until(lambda: len(_serving(client, MemberState.SYNCING)) == 3)
        publisher.offer(0, model.named_parameters())
        publisher.flush(WAIT_S)
        os.kill(victim, signal.SIGKILL)
        publisher.offer(1, model.named_parameters())
        _until(
            lambda: len(client.state().members) < 3 or any(m.state is MemberState.GONE for m in client.state().members)
        )
        known = time.perf_counter()
        _until(lambda: [m.policy_version for m in _serving(client, MemberState.SERVING)] == [1, 1])
        return time.perf_counter() - known


def _serving(client: Any, state: MemberState) -> list[Member]:
    return [member for member in client.state().members if member.state is state]


def _until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"not within {WAIT_S:g} s")
        time.sleep(0.005)


def _follow(broker: Running, name: str, versions: int) -> Counter[str]:
    """A generator without an engine: takes versions and reports them, ``versions`` of them."""
    torch.set_num_threads(1)
    client, settled = connect(broker.config, broker.url), queue.Queue[tuple[int, str]]()
    receiver = Receiver(
        config=WeightsSyncConfig(sparse=False),
        member_id=name,
        on_settled=lambda *end: settled.put(end),
        check=lambda manifest: None,
    )
    seen: Counter[str] = Counter()
    known, held, taken = 0, -1, 0
    while taken < versions:
        _report(client, name, held)
        offer: Publication | None = client.publication(after_attempt=known, wait_s=HEARTBEAT_S)
        if offer is None or name not in offer.receivers:
            known = offer.attempt if offer else known
            continue
        known = offer.attempt
        if taken == versions - 1:
            seen = _counting("receiver")
        receiver.receive(offer)
        attempt, error = settled.get(timeout=WAIT_S)
        if not error:
            receiver.take(attempt)
            held, taken = offer.version, taken + 1
    seen["receiver: report"] += 1
    _report(client, name, held)
    return seen


def _report(client: Any, name: str, held: int) -> None:
    state = MemberState.SERVING if held >= 0 else MemberState.SYNCING
    client.report(
        Member(
            member_id=name, role="generator", state=state, policy_version=held, incarnation=0 if held >= 0 else -1,
            host="127.0.0.1", pid=os.getpid(),
        )
    )  # fmt: skip
