"""What a version's bytes are on the wire: the staging buffer itself, or what has changed since a base (sparse.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weights_sync import sparse
from weights_sync.encoding import Encoding
from weights_sync.errors import SyncFailed
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
    """What has changed since ``base``, for receivers that hold it; ``whole`` if that is no more."""
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
    if sum(update.nbytes for update in updates) >= manifest.payload_bytes:
        return whole(manifest, staging)
    data = torch.cat(parts) if parts else staging.buffer[:0]
    return Payload(manifest=replace(manifest, base=base_version, updates=tuple(updates)), data=data)


def patch(staging: Staging, base: Staging, manifest: Manifest, data: Tensor) -> None:
    """Fills ``staging`` with the version that ``data`` makes of ``base``, which stays as it is. Raises SyncFailed."""
    if [(e.name, e.shape, e.dtype) for e in base.entries] != list(manifest.layout()):
        raise SyncFailed(f"version {manifest.version} is an update of another layout than the one held")
    staging.buffer.copy_(base.buffer)
    start = 0
    for entry, update in zip(manifest.entries, manifest.updates, strict=True):
        part = data[start : start + update.nbytes]
        start += update.nbytes
        target = staging.views[entry.name]
        if update.kind == "whole":
            target.reshape(-1).view(torch.uint8).copy_(part)
        else:
            sparse.apply(part, update, target, name=entry.name)
