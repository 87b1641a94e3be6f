"""What handing a version over costs the learner's loop, on two ranks that each hold half of every tensor.

ours      every rank: what ``offer`` makes it wait for; sending goes on beside the next step
copy      every rank: its own shards into a buffer that is there
peers     gather on rank 0, broadcast to the receiver, and only then the next step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from benchmarks.figures import Figure, spread
from benchmarks.processes import CONTEXT, Worker, told, workers
from benchmarks.sync_wire import BUCKET_BYTES, TIMEOUT_S, declaration
from learners.sharding import Sharding
from weights_sync.groups import Group, host_store, join_store, make_group
from weights_sync.manifest import bucket_spans
from weights_sync.slots import Slots

RANKS = 2
ANSWER_S = 600.0


def stall(quick: bool) -> list[Figure]:
    """Seconds of the slower rank."""
    total, rounds = (16 << 20, 2) if quick else (540 << 20, 5)
    urls = CONTEXT.Queue()
    ranks = [Worker(_rank, urls, "", total, rounds, 0)]
    with workers(*ranks):
        address = told(urls)
        ranks.append(Worker(_rank, urls, address, total, rounds, 1))
        receiver = Worker(_receive, address, total, rounds)
        with workers(ranks[1], receiver):
            times = [rank.answer(ANSWER_S) for rank in ranks]
            receiver.answer(TIMEOUT_S)
    ours, copy, peers = ([max(pair) for pair in zip(*(one[i] for one in times), strict=True)] for i in range(3))
    return [
        _figure("beside a copy of its shards", ours, copy, "ratio <= 1.3", lambda ratio: ratio <= 1.3, total),
        _figure("beside gather and broadcast", ours, peers, "ratio <= 0.2", lambda ratio: ratio <= 0.2, total),
    ]


def _figure(
    name: str, ours: list[float], reference: list[float], target: str, met: Callable[[float], bool], total: int
) -> Figure:
    ratio = statistics.median([a / b for a, b in zip(ours, reference, strict=True)])
    return Figure(
        measure="stall",
        backend="gloo",
        name=name,
        unit="s",
        ours=statistics.median(ours),
        reference=statistics.median(reference),
        ratio=ratio,
        target=target,
        passed=met(ratio),
        note=f"{total >> 20} MiB of float32 on {RANKS} ranks; ours {spread(ours)} ref {spread(reference)}",
    )


def _rank(urls: Any, address: str, total: int, rounds: int, rank: int) -> tuple[list[float], ...]:
    torch.set_num_threads(1)
    if rank == 0:
        _served, address = host_store("127.0.0.1", 0, TIMEOUT_S)  # as long as it is referred to
        urls.put(address)
    store = join_store(address, TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=PrefixStore("ranks", store), rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S)
    )
    group = _sync_group(address, 0) if rank == 0 else None
    model, sharding = declaration(total), Sharding(partitioned=True, rank=rank, world=RANKS, device="cpu")
    shards = [(spec.name, spec.shape, torch.rand(spec.shape[0] * spec.shape[1] // RANKS)) for spec in model.specs]
    slots = Slots(declaration(total, part=rank, parts=RANKS), wire_dtype="float32", device="cpu")
    space = [torch.zeros_like(shard) for _, _, shard in shards]
    flat = torch.zeros(total, dtype=torch.uint8)

    def whole() -> Iterator[tuple[str, Tensor]]:
        yield from sharding.whole(shards)

    def ours() -> None:
        slots.fill(0, 1, ((name, shard) for name, _, shard in shards))

    def copy() -> None:
        for target, (_, _, shard) in zip(space, shards, strict=True):
            target.copy_(shard)

    def peers() -> None:
        start = 0
        for _, tensor in whole():
            stop = start + tensor.nbytes
            flat[start:stop].copy_(tensor.reshape(-1).view(torch.uint8))
            start = stop
        if group is not None:
            for start, stop in bucket_spans(total, BUCKET_BYTES):
                group.broadcast(flat[start:stop])
        dist.barrier()

    return tuple(_times(work, rounds) for work in (ours, copy, peers))


def _times(work: Callable[[], None], rounds: int) -> list[float]:
    seconds: list[float] = []
    for _ in range(rounds + 1):  # the first warms up
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _receive(address: str, total: int, rounds: int) -> None:
    torch.set_num_threads(1)
    group, buffer = _sync_group(address, 1), torch.zeros(total, dtype=torch.uint8)
    for _ in range(rounds + 1):
        for start, stop in bucket_spans(total, BUCKET_BYTES):
            group.broadcast(buffer[start:stop])


def _sync_group(address: str, rank: int) -> Group:
    return make_group(
        backend="gloo", store=join_store(address, TIMEOUT_S), prefix="sync", rank=rank, size=2, timeout_s=TIMEOUT_S,
        address="127.0.0.1",
    )  # fmt: skip


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass
