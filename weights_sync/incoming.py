"""A version on its way in: the parts of all learner ranks, put together in one staging of whole tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weights_sync.errors import SyncFailed
from weights_sync.held import Held
from weights_sync.manifest import Manifest, check_parts, whole_entries, with_digests
from weights_sync.staging import Staging
from weights_sync.updates import unpack


class Incoming:
    """``room`` and ``put`` for each part in turn, then ``whole``."""

    def __init__(self, held: Held, *, device: str) -> None:
        self._held, self._device = held, device
        self._parts: list[Manifest] = []
        self._staging: Staging | None = None

    def room(self, manifest: Manifest) -> Tensor:
        """Where the part's payload is received: in its place, if it is all of a whole version."""
        if self._staging is None:
            whole = replace(manifest, entries=whole_entries(manifest), base=manifest.base, updates=())
            self._staging = self._held.room(whole, self._device)
        if manifest.parts == 1 and manifest.base < 0:
            return self._staging.buffer
        return torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=self._device)

    def put(self, manifest: Manifest, data: Tensor) -> None:
        """Takes a received part in. Raises SyncFailed when it cannot be used."""
        assert self._staging is not None
        if manifest.base >= 0 and not self._parts:
            self._begin_with(manifest)
        self._parts.append(manifest)
        if data is not self._staging.buffer:
            if unknown := [entry.name for entry in manifest.entries if entry.name not in self._staging.views]:
                raise SyncFailed(f"part {manifest.part} has tensors that part 0 does not name: {unknown[:5]}")
            unpack(self._staging, manifest, data)

    def received(self) -> tuple[Manifest, Staging]:
        """Part 0's manifest and all bytes, as they came."""
        assert self._staging is not None
        return self._parts[0], self._staging

    def whole(self) -> tuple[Manifest, Staging]:
        """The version. Raises SyncFailed where bytes differ from their digests, or elements are missing."""
        assert self._staging is not None
        check_parts(self._parts)
        for part in self._parts:
            self._staging.verify(part)
        first = self._parts[0]
        if first.parts == 1:
            return first, self._staging
        joined = replace(first, entries=self._staging.entries, part=0, parts=1, base=-1, updates=())
        return with_digests(joined, self._staging.digest_of), self._staging

    def _begin_with(self, manifest: Manifest) -> None:
        assert self._staging is not None
        base = self._held.base(manifest)
        if base is None:
            raise SyncFailed(
                f"version {manifest.version} is an update of version {manifest.base}, which is not held here"
            )
        if [(e.name, e.shape, e.dtype) for e in base.entries] != list(manifest.layout()):
            raise SyncFailed(f"version {manifest.version} is an update of another layout than the one held")
        self._staging.buffer.copy_(base.buffer)
