"""A learner rank's staging buffers, by number: what is filled and sent is decided on rank 0, for all (shelf.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

from weights_sync import updates
from weights_sync.errors import SyncFailed
from weights_sync.manifest import Manifest
from weights_sync.shelf import Shelf
from weights_sync.staging import Declaration, Staging
from weights_sync.updates import Payload

COUNT = 3


class Slots:
    """``fill`` is called by the rank's training thread, ``payload`` by the one that sends. Buffers are made when used.

    A transfer that was abandoned may still be reading a buffer that is filled again. That is harmless: whoever still
    listens to it holds the digests of the old bytes.
    """

    def __init__(
        self, declaration: Declaration, *, wire_dtype: str, device: str, keep_fp32: Sequence[str] = ()
    ) -> None:
        self._declaration = declaration
        self._wire_dtype, self._device, self._keep_fp32 = wire_dtype, device, keep_fp32
        self._stagings: list[Staging | None] = [None] * COUNT
        self._versions = [-1] * COUNT
        self._changed = threading.Condition()
        self._sealed: dict[int, Manifest] = {}
        self._update: Payload | None = None
        for slot in range(2):  # the two that are always needed, before training begins
            self._staging(slot)

    def fill(self, slot: int, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies what this rank has of a version in. Raises LayoutRefused; then the slot holds no version."""
        with self._changed:
            self._versions[slot] = -1
            self._sealed.pop(slot, None)
        self._staging(slot).fill(tensors)
        with self._changed:
            self._versions[slot] = version
            self._changed.notify_all()

    def manifest(self, slot: int, version: int, incarnation: int, *, wait_s: float) -> Manifest:
        """The sealed manifest of a version, waiting until it is there.

        Raises LayoutRefused for numbers that are not finite, SyncFailed when it does not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._versions[slot] == version, wait_s):
                raise SyncFailed(f"version {version} is not in slot {slot} within weights_sync.sync_timeout_s")
            known = self._sealed.get(slot)
        if known is None:
            staging = self._staging(slot)
            staging.refuse_nonfinite(version)
            known = staging.sealed(version=version, incarnation=incarnation, declaration=self._declaration)
            self._sealed[slot] = known
        return known

    def shown(self, shelf: Shelf, incarnation: int, *, update: bool) -> Payload:
        """On rank 0: what is sent of the version that the shelf shows, as an update of its base if there is one."""
        shown, base = shelf.shown, shelf.base
        assert shown is not None
        manifest = self.manifest(shown.slot, shown.version, incarnation, wait_s=0.0)
        if not update or base is None or base == shown:
            return self.payload(manifest, shown.slot)
        return self.payload(manifest, shown.slot, base_slot=base.slot, base_version=base.version)

    def payload(self, manifest: Manifest, slot: int, *, base_slot: int = -1, base_version: int = -1) -> Payload:
        """What of a sealed version is sent: all, or what has changed since the version in another slot."""
        staging = self._staging(slot)
        if base_slot < 0:
            return updates.whole(manifest, staging)
        made = self._update
        if made is None or (made.manifest.version, made.manifest.base) != (manifest.version, base_version):
            made = self._update = updates.since(base_version, self._staging(base_slot), manifest, staging)
        return made

    def _staging(self, slot: int) -> Staging:
        staging = self._stagings[slot]
        if staging is None:
            staging = self._stagings[slot] = Staging.planned(
                self._declaration, wire_dtype=self._wire_dtype, device=self._device, keep_fp32=self._keep_fp32
            )
        return staging
