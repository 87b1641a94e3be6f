"""Whole tensors from the shards of all ranks.

ZeRO-3 keeps of every parameter one flat shard a rank, padded to equal length; below stage 3 each rank has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weights_sync.staging import shard_of

_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How this rank's tensors are laid out. ``partitioned``: ZeRO-3."""

    partitioned: bool
    rank: int
    world: int
    device: str

    def whole(self, shards: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Collective. From (name, whole shape, this rank's shard) to (name, whole tensor) on rank 0, nothing elsewhere.

        One gather a bucket, and every rank goes through the same buckets in the same order (C2).
        """
        if not self.partitioned:
            for name, _, tensor in shards:
                if self.rank == 0:
                    yield name, tensor.detach()
            return
        bucket: list[tuple[str, tuple[int, ...], Tensor]] = []
        size = 0
        for shard in shards:
            bucket.append(shard)
            size += shard[2].numel() * shard[2].element_size() * self.world
            if size >= _BUCKET_BYTES:
                yield from self._gathered(bucket)
                bucket, size = [], 0
        if bucket:
            yield from self._gathered(bucket)

    def _gathered(self, bucket: Sequence[tuple[str, tuple[int, ...], Tensor]]) -> Iterator[tuple[str, Tensor]]:
        flat = torch.cat([shard.detach().reshape(-1) for _, _, shard in bucket]).to(self.device)
        parts = [flat]
        if self.world > 1:
            parts = [torch.empty_like(flat) for _ in range(self.world)] if self.rank == 0 else []
            dist.gather(flat, parts or None, dst=0)
        if self.rank != 0:
            return
        offset = 0
        for name, shape, shard in bucket:
            pieces = [part[offset : offset + shard.numel()] for part in parts]
            yield name, torch.cat(pieces)[: math.prod(shape)].view(shape)
            offset += shard.numel()

    def part(self, whole: tuple[int, ...], shard: Tensor) -> Tensor:
        """This rank's elements of a tensor of this whole shape: all of it on a single rank, else flat, unpadded."""
        elements = math.prod(whole)
        if self.world == 1:
            return shard.detach().reshape(-1)[:elements].view(whole)
        start, count = shard_of(elements, self.rank, self.world)
        flat = shard.detach().reshape(-1)
        return flat[:count] if self.partitioned else flat[start : start + count]

    def mine(self, whole: Tensor, size: int) -> Tensor:
        """This rank's flat shard of ``size`` elements of a whole tensor, zeros where it is padded."""
        padded = torch.zeros(size * self.world, dtype=whole.dtype)
        padded[: whole.numel()] = whole.reshape(-1)
        return padded[size * self.rank : size * (self.rank + 1)].to(self.device)


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, however it is partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def local_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter."""
    shard = getattr(parameter, "ds_tensor", parameter)
    assert isinstance(shard, Tensor)
    return shard
