"""A sparse update: how small it is, and what making and applying it costs beside copying the version once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.figures import BenchmarkError, Figure, spread
from benchmarks.processes import Worker, workers
from benchmarks.sync_wire import declaration
from weights_sync.manifest import Manifest
from weights_sync.staging import Staging
from weights_sync.updates import Payload, since, unpack

SHARES = (0.001, 0.01, 0.07)
ANSWER_S = 600.0


def update(quick: bool) -> list[Figure]:
    """Of a bfloat16 version of which a random share of the elements has changed."""
    elements, rounds = (2 << 20, 2) if quick else (128 << 20, 3)
    worker = Worker(_measure, elements, rounds)
    with workers(worker):
        return worker.answer(ANSWER_S)


def _measure(elements: int, rounds: int) -> list[Figure]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base, new, got = (Staging.planned(declaration(4 * elements), wire_dtype="bfloat16") for _ in range(3))
    for view in base.views.values():
        view.normal_()
    manifest = Manifest(version=1, incarnation=0, entries=base.entries)
    figures: list[Figure] = []
    for share in SHARES:
        new.buffer.copy_(base.buffer)
        for view in new.views.values():
            view[torch.rand(view.shape) < share] += 1
        payload = since(0, base, manifest, new)
        making = _seconds(lambda: since(0, base, manifest, new), rounds)
        applying = _seconds(lambda payload=payload: _apply(got, base, payload), rounds)  # type: ignore[misc]
        if not torch.equal(got.buffer, new.buffer):
            raise BenchmarkError("an update did not give what was sent")
        copying = _seconds(lambda: got.buffer.copy_(base.buffer), rounds)
        sent = payload.data.numel() / manifest.payload_bytes
        note = f"{elements >> 20} Mi elements, {100 * share:g} % changed at random"
        figures.append(
            Figure(
                measure="update", backend="-", name=f"bytes, {100 * share:g} % changed", unit="% of whole",
                ours=100 * sent, note=note,
            )
        )  # fmt: skip
        for name, seconds in (("making", making), ("applying", applying)):
            figures.append(
                Figure(
                    measure="update", backend="-", name=f"{name} it, {100 * share:g} % changed", unit="s (ref: a copy)",
                    ours=statistics.median(seconds), reference=statistics.median(copying),
                    ratio=statistics.median(seconds) / statistics.median(copying), note=spread(seconds),
                )
            )  # fmt: skip
    return figures


def _apply(got: Staging, base: Staging, payload: Payload) -> None:
    got.buffer.copy_(base.buffer)
    unpack(got, payload.manifest, payload.data)


def _seconds(work: Callable[[], object], rounds: int) -> list[float]:
    taken: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken
