"""What a version's bytes are on the wire: the staging buffer itself, or what has changed since a base (sparse.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weights_sync import sparse
from weights_sync.encoding import Encoding
from weights_sync.manifest import Manifest
from weights_sync.staging import Staging


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A version ready to be sent. ``data``: uint8, [manifest.wire_bytes]."""

    manifest: Manifest
    data: Tensor


def whole(manifest: Manifest, staging: Staging) -> Payload:
    """Every tensor whole; nothing is copied."""
    return Payload(manifest=manifest, data=staging.buffer)


def since(base_version: int, base: Staging, manifest: Manifest, staging: Staging) -> Payload:
    """What has changed since ``base``, for receivers that hold it; of a single part ``whole`` if that is no more."""
    updates: list[Encoding] = []
    parts: list[Tensor] = []
    for entry in manifest.entries:
        new = staging.views[entry.name]
        gaps = sparse.gaps_of(sparse.changes(base.views[entry.name], new))
        update = sparse.plan(gaps, elements=new.numel(), item_bytes=new.element_size())
        updates.append(update)
        if update.kind == "whole":
            parts.append(new.reshape(-1).view(torch.uint8))
        elif update.count:
            part = torch.empty(update.nbytes, dtype=torch.uint8, device=new.device)
            sparse.encode(new, gaps, update, part)
            parts.append(part)
    if manifest.parts == 1 and sum(update.nbytes for update in updates) >= manifest.payload_bytes:
        return whole(manifest, staging)  # parts are all told alike
    data = torch.cat(parts) if parts else staging.buffer[:0]
    return Payload(manifest=replace(manifest, base=base_version, updates=tuple(updates)), data=data)


def unpack(staging: Staging, manifest: Manifest, data: Tensor) -> None:
    """Puts one part's payload into staging of whole tensors, which for an update holds the base. Raises SyncFailed."""
    start = 0
    for i, entry in enumerate(manifest.entries):
        target = staging.segment(entry)
        if not manifest.updates:
            target.view(torch.uint8).copy_(data[entry.offset : entry.offset + entry.nbytes])
            continue
        update = manifest.updates[i]
        piece = data[start : start + update.nbytes]
        start += update.nbytes
        if update.kind == "whole":
            target.view(torch.uint8).copy_(piece)
        else:
            sparse.apply(piece, update, target, name=entry.name)
