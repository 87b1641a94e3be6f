"""A whole version over one group, beside bare broadcasts: the same processes, bytes and buckets, in turns.

rank 0: send ──gloo──► ranks 1..G: receive ──► "got it" in the store        timed at rank 0, start to last answer
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.figures import Figure, spread
from benchmarks.processes import CONTEXT, Worker, told, workers
from broker.messages import Publication
from weights_sync.groups import Group, host_store, join_store, make_group
from weights_sync.held import Held
from weights_sync.incoming import Incoming
from weights_sync.manifest import TensorSpec, bucket_spans
from weights_sync.staging import Declaration, Staging, shard_of
from weights_sync.transfer import receive, send
from weights_sync.updates import whole

RECEIVERS = (1, 2, 4)
BUCKET_BYTES = 64 << 20
TENSORS = 64
TIMEOUT_S = 60.0
ANSWER_S = 600.0


def wire(quick: bool) -> list[Figure]:
    """Bytes a second to each receiver."""
    total, rounds = (16 << 20, 2) if quick else (1 << 30, 5)
    figures: list[Figure] = []
    for count in RECEIVERS:
        urls = CONTEXT.Queue()
        sender = Worker(_send, urls, total, rounds, count)
        with workers(sender):
            address = told(urls)
            receivers = [Worker(_receive, address, total, rounds, rank, count) for rank in range(1, count + 1)]
            with workers(*receivers):
                ours, bare = sender.answer(ANSWER_S)
                for receiver in receivers:
                    receiver.answer(TIMEOUT_S)
        ratios = [b / a for a, b in zip(ours, bare, strict=True)]
        ratio = statistics.median(ratios)
        figures.append(
            Figure(
                measure="wire",
                backend="gloo",
                name=f"whole version, {count} receivers",
                unit="MB/s each",
                ours=total / statistics.median(ours) / 1e6,
                reference=total / statistics.median(bare) / 1e6,
                ratio=ratio,
                target="ratio >= 0.9",
                passed=ratio >= 0.9,
                note=f"{total >> 20} MiB in buckets of {BUCKET_BYTES >> 20} MiB; ours {spread(ours)} s, "
                f"bare {spread(bare)} s, ratio {spread(ratios)}",
            )
        )
    return figures


def declaration(total: int, *, part: int = 0, parts: int = 1) -> Declaration:
    """A model of ``total`` bytes of float32 in equal tensors, or one rank's part of it."""
    rows = total // 4 // TENSORS // 1024
    start, count = shard_of(rows * 1024, part, parts)
    specs = [TensorSpec(name=f"w{i}", shape=(rows, 1024), start=start, count=count) for i in range(TENSORS)]
    return Declaration(specs=tuple(specs), tied={}, part=part, parts=parts)


def _send(urls: Any, total: int, rounds: int, count: int) -> tuple[list[float], list[float]]:
    store, address = host_store("127.0.0.1", 0, TIMEOUT_S)
    urls.put(address)
    group = _group(join_store(address, TIMEOUT_S), 0, count)
    model = declaration(total)
    staging = Staging.planned(model, wire_dtype="float32")
    staging.buffer.random_(0, 255)
    for view in staging.views.values():
        view.uniform_()
    payload = whole(staging.sealed(version=1, incarnation=0, declaration=model), staging)

    def bare() -> None:
        for start, stop in bucket_spans(total, BUCKET_BYTES):
            group.broadcast(staging.buffer[start:stop])

    def ours() -> None:
        send(group, _publication(address, count), payload, bucket_bytes=BUCKET_BYTES)

    return _timed(store, ours, rounds, count, "ours", "bare", bare)


def _timed(
    store: TCPStore, ours: Callable[[], None], rounds: int, count: int, one: str, other: str, bare: Callable[[], None]
) -> tuple[list[float], list[float]]:
    seconds: dict[str, list[float]] = {one: [], other: []}
    for number in range(rounds + 2):  # the first two fill the buffers that are used from then on
        for name, work in ((one, ours), (other, bare)):
            start = time.perf_counter()
            work()
            store.wait([f"{name}/{number}/{rank}" for rank in range(1, count + 1)], timedelta(seconds=TIMEOUT_S))
            seconds[name].append(time.perf_counter() - start)
    return seconds[one][2:], seconds[other][2:]


def _receive(address: str, total: int, rounds: int, rank: int, count: int) -> None:
    store = join_store(address, TIMEOUT_S)
    group = _group(store, rank, count)
    buffer, held = torch.zeros(total, dtype=torch.uint8), Held(keep=True)
    for number in range(rounds + 2):
        incoming = Incoming(held, device="cpu")
        incoming.put(*receive(group, _publication(address, count), 0, incoming.room))
        held.add(*incoming.received())
        store.set(f"ours/{number}/{rank}", "")
        for start, stop in bucket_spans(total, BUCKET_BYTES):
            group.broadcast(buffer[start:stop])
        store.set(f"bare/{number}/{rank}", "")


def _group(store: TCPStore, rank: int, count: int) -> Group:
    torch.set_num_threads(1)
    return make_group(
        backend="gloo",
        store=store,
        prefix="wire",
        rank=rank,
        size=count + 1,
        timeout_s=TIMEOUT_S,
        address="127.0.0.1",
    )


def _publication(address: str, count: int) -> Publication:
    names = tuple(f"g{rank}" for rank in range(1, count + 1))
    return Publication(version=1, incarnation=0, attempt=1, epoch=1, store=address, receivers=names)
