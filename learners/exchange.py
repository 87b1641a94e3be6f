"""How rank 0 tells the other ranks what comes next: one frame at a time over a gloo group of its own, no pickle.

    rank 0: produce(wait) ─► frame ─broadcast─► every rank: the same bytes

Rank 0 may wait for a batch or an evaluation far longer than any collective should: meanwhile it sends empty frames, so
that the group's timeout stays short and a dead rank is noticed by the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from broker.errors import SlipstreamError
from learners.batching import TrainSequence

Produce = Callable[[float], bytes | None]
Part = TypeVar("Part", covariant=True)

_WAIT, _FRAME, _FAILED = range(3)
_HEADER = struct.Struct("<BQ")
_FIRST_BYTES = 64 << 10  # most plans of a small model fit into the first broadcast
_SCHEMA = 3


class RootFailed(SlipstreamError):
    """Rank 0 has ended with the error named; its own output tells more."""


Rows = Sequence[Sequence[TrainSequence]]
"""[micro-batch][row] of one rank."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch(Generic[Part]):
    """What one optimizer step trains. ``denominator``: loss tokens over all ranks."""

    denominator: int
    micro_batches: Part


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[Part]):
    """One learner step, for every rank or for one.

    Attributes:
        mini_batches: a rank has the rows of a mini-batch in every epoch, so that what it knows of them stays with it.
        order: of the optimizer steps, each the index of a mini-batch; every one once an epoch.
        completions: of the batch, those without loss included.
    """

    mini_batches: Sequence[MiniBatch[Part]]
    order: Sequence[int]
    completions: int

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained, each counted once."""
        return sum(one.denominator for one in self.mini_batches)


class Exchange:
    """One end of the channel on every rank. ``timeout_s``: without a frame for this long, rank 0 counts as dead."""

    def __init__(self, *, rank: int, world: int, timeout_s: float) -> None:
        self._rank, self._wait_s = rank, min(5.0, timeout_s / 4)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world > 1 else None

    def share(self, produce: Produce | None) -> bytes:
        """Collective. What ``produce`` of rank 0 returns; the other ranks pass None.

        ``produce(wait_s)`` returns None when it has nothing after ``wait_s``, and is called again. Its exception is
        raised on rank 0, and as RootFailed on the others.
        """
        while True:
            kind, payload = self._lead(produce) if produce is not None else self._follow()
            if kind == _FAILED:
                raise RootFailed(f"rank 0: {payload.decode()}")
            if kind == _FRAME:
                return payload

    def _lead(self, produce: Produce) -> tuple[int, bytes]:
        try:
            payload = produce(self._wait_s)
        except Exception as error:  # teardown: the other ranks must not wait for a rank that is about to end
            self._broadcast(_FAILED, f"{type(error).__name__}: {error}".encode())
            raise
        if payload is None:
            self._broadcast(_WAIT, b"")
            return _WAIT, b""
        self._broadcast(_FRAME, payload)
        return _FRAME, payload

    def _broadcast(self, kind: int, payload: bytes) -> None:
        if self._group is None:
            return
        frame = np.zeros(_FIRST_BYTES, np.uint8)
        head = _HEADER.pack(kind, len(payload)) + payload[: _FIRST_BYTES - _HEADER.size]
        frame[: len(head)] = np.frombuffer(head, np.uint8)
        dist.broadcast(torch.from_numpy(frame), src=0, group=self._group)
        if rest := payload[_FIRST_BYTES - _HEADER.size :]:
            dist.broadcast(torch.from_numpy(np.frombuffer(rest, np.uint8).copy()), src=0, group=self._group)

    def _follow(self) -> tuple[int, bytes]:
        frame = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(frame, src=0, group=self._group)
        data = frame.numpy().tobytes()
        kind, size = _HEADER.unpack_from(data)
        payload = data[_HEADER.size : _HEADER.size + size]
        if len(payload) < size:
            rest = torch.empty(size - len(payload), dtype=torch.uint8)
            dist.broadcast(rest, src=0, group=self._group)
            payload += rest.numpy().tobytes()
        return kind, payload


def encode(plan: Plan[Sequence[Rows]]) -> bytes:
    """Every rank's share is packed by itself, so that a rank unpacks its own alone. Micro-batches: one item a rank."""
    shares = [
        msgpack.packb([[[_pack(row) for row in rows] for rows in mine] for mine in ranks])
        for ranks in zip(*(one.micro_batches for one in plan.mini_batches), strict=True)
    ]
    denominators = [one.denominator for one in plan.mini_batches]
    return bytes(msgpack.packb([_SCHEMA, plan.completions, list(plan.order), denominators, shares]))


def decode(frame: bytes, rank: int) -> Plan[Rows]:
    """The share of one rank."""
    schema, completions, order, denominators, shares = msgpack.unpackb(frame)
    assert schema == _SCHEMA
    return Plan(
        mini_batches=[
            MiniBatch(denominator=denominator, micro_batches=[[_unpack(row) for row in rows] for rows in mine])
            for denominator, mine in zip(denominators, msgpack.unpackb(shares[rank]), strict=True)
        ],
        order=order,
        completions=completions,
    )


def _pack(row: TrainSequence) -> list[bytes | float]:
    arrays = (row.prompt_ids, row.completion_ids, row.loss_mask, row.behavior_logprobs, row.staleness)
    return [*(array.tobytes() for array in arrays), row.advantage, row.weight, row.index]


def _unpack(row: tuple[bytes, bytes, bytes, bytes, bytes, float, float, int]) -> TrainSequence:
    prompt, completion, mask, behavior, staleness, advantage, weight, index = row
    return TrainSequence(
        prompt_ids=np.frombuffer(prompt, np.int32),
        completion_ids=np.frombuffer(completion, np.int32),
        loss_mask=np.frombuffer(mask, np.uint8),
        behavior_logprobs=np.frombuffer(behavior, np.float32),
        staleness=np.frombuffer(staleness, np.int32),
        advantage=advantage,
        weight=weight,
        index=index,
    )
