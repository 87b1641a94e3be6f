"""The dumb copy: header, manifest, payload, each a broadcast from one learner rank over a group of its own.

    header   int64 [8]: magic, schema, attempt, version, incarnation, manifest bytes, wire bytes, bucket bytes
    manifest uint8 [manifest bytes]: msgpack, see weights_sync/manifest.py
    payload  uint8 [wire bytes], in buckets: the rank's elements as they lie in staging, or what has changed of them

Part after part: each learner rank has a group with the receivers, in which it is rank 0.
A receiver that will refuse what it sees takes part to the end: gloo relays along a tree, and leaving early would
break the transfer of others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from broker.messages import Publication
from weights_sync.errors import SyncFailed
from weights_sync.groups import Group
from weights_sync.manifest import SCHEMA, Manifest, bucket_spans, decode, encode
from weights_sync.updates import Payload

_MAGIC = 0x534C4950  # "SLIP"
_MAX_MANIFEST_BYTES = 1 << 30


def send(
    group: Group,
    publication: Publication,
    payload: Payload,
    *,
    bucket_bytes: int,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Rank 0's half; ``moved`` is called after every bucket. Raises SyncFailed."""
    data, total = bytearray(encode(payload.manifest)), payload.data.numel()
    head = [_MAGIC, SCHEMA, publication.attempt, publication.version, publication.incarnation]
    header = torch.tensor([*head, len(data), total, bucket_bytes], dtype=torch.int64)
    group.broadcast(header.to(group.device))
    group.broadcast(torch.frombuffer(data, dtype=torch.uint8).to(group.device))
    for start, stop in bucket_spans(total, bucket_bytes):
        group.broadcast(payload.data[start:stop])
        moved()


def receive(
    group: Group, publication: Publication, part: int, room: Callable[[Manifest], Tensor]
) -> tuple[Manifest, Tensor]:
    """The other ranks' half: a part's manifest and payload, not yet verified. Raises SyncFailed.

    ``room``: where the payload is to be put, uint8, [wire bytes].
    """
    header = torch.zeros(8, dtype=torch.int64, device=group.device)
    group.broadcast(header)
    magic, schema, attempt, version, incarnation, manifest_bytes, wire_bytes, bucket_bytes = header.tolist()
    if (magic, schema) != (_MAGIC, SCHEMA) or not 0 < manifest_bytes <= _MAX_MANIFEST_BYTES or bucket_bytes <= 0:
        raise SyncFailed(f"not a header of schema {SCHEMA}: {header.tolist()}")
    packed = torch.zeros(manifest_bytes, dtype=torch.uint8, device=group.device)
    group.broadcast(packed)
    manifest = decode(packed.cpu().numpy().tobytes())
    if manifest.wire_bytes != wire_bytes:
        raise SyncFailed(f"header announces {wire_bytes} bytes, manifest {manifest.wire_bytes}")
    data = room(manifest)
    for start, stop in bucket_spans(wire_bytes, bucket_bytes):
        group.broadcast(data[start:stop])
    sent = (publication.attempt, publication.version, publication.incarnation)
    if (attempt, version, incarnation) != sent:
        raise SyncFailed(f"attempt, version, incarnation {(attempt, version, incarnation)} came, {sent} was announced")
    check_announced(manifest, publication, part)
    return manifest, data


def check_announced(manifest: Manifest, publication: Publication, part: int) -> None:
    """Raises SyncFailed unless the manifest is of this part of the version that was announced."""
    came, told = (manifest.version, manifest.incarnation), (publication.version, publication.incarnation)
    if came != told:
        raise SyncFailed(f"version, incarnation {came} came, {told} was announced")
    if (manifest.part, manifest.parts) != (part, publication.senders):
        raise SyncFailed(f"part {manifest.part} of {manifest.parts} came, not {part} of {publication.senders}")
