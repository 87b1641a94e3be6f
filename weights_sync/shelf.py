"""Two staging buffers: the version being sent, and the newest one waiting behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor

from weights_sync.manifest import Manifest
from weights_sync.staging import Declaration, Staging


class Shelf:
    """``put`` is called by the learner's thread, ``promote`` by the publisher's; neither waits for the other's copy.

    A transfer that was abandoned may still be reading a buffer that is filled again. That is harmless: whoever still
    listens to it holds the digests of the old bytes.
    """

    def __init__(self, declaration: Declaration, *, wire_dtype: str, device: str) -> None:
        self.declaration = declaration
        self._lock = threading.Lock()
        self._shown = Staging.planned(declaration, wire_dtype=wire_dtype, device=device)
        self._behind = Staging.planned(declaration, wire_dtype=wire_dtype, device=device)
        self._waiting: int | None = None

    @property
    def waiting(self) -> int | None:
        """The version waiting to be sent, if any."""
        with self._lock:
            return self._waiting

    def put(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies a version into the waiting place; one that still waits there is replaced.

        Raises LayoutRefused; then nothing waits, and the version being sent stays whole.
        """
        with self._lock:
            self._waiting, target = None, self._behind
        target.fill(tensors)
        with self._lock:
            self._waiting = version

    def promote(self, incarnation: int) -> tuple[Manifest, Staging] | None:
        """Makes the waiting version, if there is one, the version being sent, and seals it with its digests."""
        with self._lock:
            if self._waiting is None:
                return None
            version, self._waiting = self._waiting, None
            self._shown, self._behind = self._behind, self._shown
            shown = self._shown
        return shown.sealed(version=version, incarnation=incarnation, declaration=self.declaration), shown
