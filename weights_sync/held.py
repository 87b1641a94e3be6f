"""The versions that a receiver keeps: the bases of updates, and buffers to receive the next version into."""

from __future__ import annotations

import threading

import torch

from weights_sync.manifest import Manifest
from weights_sync.staging import Staging


class Held:
    """The last two versions that were taken: one of them is in use, whichever the engine ended up with.

    A fresh buffer of a large version costs more in page faults than a fast wire takes to fill it, so the older of the
    two is received into, unless the version to come is an update of it.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: list[tuple[tuple[int, int], Staging]] = []

    def add(self, manifest: Manifest, staging: Staging) -> None:
        """The engine is about to load this version."""
        if self._keep:
            with self._lock:
                self._versions = [*self._versions[-1:], ((manifest.incarnation, manifest.version), staging)]

    def base(self, manifest: Manifest) -> Staging | None:
        """What the manifest's payload is an update of, if it is held."""
        with self._lock:
            return dict(self._versions).get((manifest.incarnation, manifest.base))

    def room(self, manifest: Manifest, device: str) -> Staging:
        """Staging for a version to come, with any bytes in it.

        A buffer that is handed out again is held no more: should its transfer be left behind, whatever still arrives
        there harms nobody.
        """
        with self._lock:
            if len(self._versions) == 2 and self._versions[0][0] != (manifest.incarnation, manifest.base):
                _, spare = self._versions.pop(0)
                if spare.buffer.numel() == manifest.payload_bytes and str(spare.buffer.device) == device:
                    return Staging(manifest.entries, buffer=spare.buffer)
        return Staging(manifest.entries, buffer=torch.empty(manifest.payload_bytes, dtype=torch.uint8, device=device))
