"""The dumb copy through a depot: what weights_sync/transfer.py is for process groups.

room_for:  the most that a version takes, known before there is one
put_part:  bucket, bucket, … , manifest      then the version is announced: nobody waits for a part
get_part:  manifest, bucket, bucket, …       as often as there are readers
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.depot import Depot, folder_at
from weights_sync.encoding import Encoding
from weights_sync.errors import SyncFailed
from weights_sync.manifest import Manifest, bucket_spans, decode, encode, plan, with_digests
from weights_sync.staging import Declaration, shard_of
from weights_sync.transfer import check_announced
from weights_sync.updates import Payload

_BUCKET = struct.Struct("<Q")  # bytes of a bucket, before the manifest


def folder_of(publication: Publication, transport: str) -> str:
    """Where an attempt's blobs are. Raises SyncFailed when it went another way."""
    return f"{folder_at(publication.store, transport)}/{publication.attempt}"


def room_for(config: WeightsSyncConfig, declaration: Declaration) -> tuple[int, int]:
    """(bytes of a version, of its largest blob) at most, all learner ranks' parts and their manifests together.

    ``declaration``: of part 0, which has some of every tensor.
    """
    version = largest = 0
    for part in range(declaration.parts):
        specs = []
        for spec in declaration.specs:
            start, count = (0, -1) if spec.buffer else shard_of(math.prod(spec.shape), part, declaration.parts)
            if count and not (spec.buffer and part):
                specs.append(replace(spec, start=start, count=count))
        entries = plan(specs, wire_dtype=config.wire_dtype, keep_fp32=config.keep_fp32)
        updates = [Encoding(kind="sparse", count=one.count, gap_bytes=4, nbytes=2 * one.nbytes) for one in entries]
        manifest = Manifest(
            version=1 << 31, incarnation=1 << 31, entries=entries, base=1 << 31, updates=tuple(updates),
            tied=declaration.tied, buffers=declaration.buffers, part=part, parts=declaration.parts,
        )  # fmt: skip
        manifest_bytes = _BUCKET.size + len(encode(with_digests(manifest, lambda _: "0" * 32)))
        version += manifest.payload_bytes + manifest_bytes
        largest = max(largest, manifest_bytes, min(config.blob_bytes, manifest.payload_bytes))
    return version, largest


def put_part(
    depot: Depot,
    config: WeightsSyncConfig,
    publication: Publication,
    payload: Payload,
    *,
    moved: Callable[[], None],
    over: Callable[[], bool],
) -> None:
    """A learner rank's half; ``moved`` is called after every bucket. Raises SyncFailed, also once it is ``over``."""
    folder, part, bucket = folder_of(publication, config.transport), payload.manifest.part, config.blob_bytes
    data = payload.data.cpu().numpy().data
    for i, (start, stop) in enumerate(bucket_spans(len(data), bucket)):
        if over():
            raise SyncFailed("abandoned")
        depot.put(f"{folder}/{part}.{i}", data[start:stop])
        moved()
    depot.put(f"{folder}/{part}.manifest", _BUCKET.pack(bucket) + encode(payload.manifest))


def get_part(
    depot: Depot,
    config: WeightsSyncConfig,
    publication: Publication,
    part: int,
    room: Callable[[Manifest], Tensor],
    *,
    moved: Callable[[], None],
) -> tuple[Manifest, Tensor]:
    """A reader's half: a part's manifest and payload, not yet verified. Raises SyncFailed.

    ``room``: where the payload is to be put, uint8, [wire bytes], on the CPU.
    """
    folder = folder_of(publication, config.transport)
    packed = memoryview(depot.read(f"{folder}/{part}.manifest"))
    bucket = _BUCKET.unpack_from(packed)[0] if len(packed) > _BUCKET.size else 0
    manifest = decode(bytes(packed[_BUCKET.size :]))
    if not bucket:
        raise SyncFailed(f"part {part} of version {publication.version}: buckets of no size")
    check_announced(manifest, publication, part)
    moved()
    data = room(manifest)
    assert data.device.type == "cpu" and data.dtype == torch.uint8
    target = data.numpy().data
    for i, (start, stop) in enumerate(bucket_spans(len(target), bucket)):
        depot.read_into(f"{folder}/{part}.{i}", target[start:stop])
        moved()
    return manifest, data
