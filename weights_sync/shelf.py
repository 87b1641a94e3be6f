"""The learner's staging buffers: the version being sent, the newest one waiting behind it, and the receivers' base.

    put -> waiting --promote--> shown --confirm--> base        a buffer that is none of these is spare

Without sparse updates there is no base, and two buffers do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

from weights_sync import updates
from weights_sync.manifest import Manifest
from weights_sync.staging import Declaration, Staging
from weights_sync.updates import Payload


class Shelf:
    """``put`` is called by the learner's thread, all else by the publisher's; neither waits for the other's copy.

    A transfer that was abandoned may still be reading a buffer that is filled again. That is harmless: whoever still
    listens to it holds the digests of the old bytes.
    """

    def __init__(
        self, declaration: Declaration, *, wire_dtype: str, device: str, sparse: bool, keep_fp32: Sequence[str] = ()
    ) -> None:
        self.declaration = declaration
        self._lock = threading.Lock()
        self._shown, self._behind = (
            Staging.planned(declaration, wire_dtype=wire_dtype, device=device, keep_fp32=keep_fp32) for _ in range(2)
        )
        self._spare: Staging | None = None
        self._sparse = sparse
        self._waiting: int | None = None
        self._manifest: Manifest | None = None
        self._base: tuple[int, Staging] | None = None
        self._update: Payload | None = None

    @property
    def waiting(self) -> int | None:
        """The version waiting to be sent, if any."""
        with self._lock:
            return self._waiting

    @property
    def shown(self) -> Manifest | None:
        """The version being sent, sealed."""
        return self._manifest

    @property
    def base(self) -> int | None:
        """The version that ``payload`` can be an update of."""
        return self._base[0] if self._base is not None else None

    def put(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies a version into the waiting place; one that still waits there is replaced.

        Raises LayoutRefused; then nothing waits, and the version being sent stays whole.
        """
        with self._lock:
            self._waiting, target = None, self._behind
        target.fill(tensors)
        with self._lock:
            self._waiting = version

    def promote(self, incarnation: int) -> bool:
        """Makes the waiting version, if there is one, the version being sent, and seals it with its digests.

        Raises LayoutRefused for numbers that are not finite.
        """
        with self._lock:
            if self._waiting is None:
                return False
            version, self._waiting = self._waiting, None
            if self._base is not None and self._base[1] is self._shown:  # it is not to be written to
                self._shown, self._behind, self._spare = self._behind, self._spare or self._shown.empty_like(), None
            else:
                self._shown, self._behind = self._behind, self._shown
        self._shown.refuse_nonfinite(version)
        self._manifest = self._shown.sealed(version=version, incarnation=incarnation, declaration=self.declaration)
        self._update = None
        return True

    def confirm(self) -> None:
        """Every receiver holds the version being sent: the next one may be told as an update of it."""
        if not self._sparse or self._manifest is None or self.base == self._manifest.version:
            return
        if self._base is not None:
            self._spare = self._base[1]
        self._base = (self._manifest.version, self._shown)

    def payload(self, *, sparse: bool) -> Payload:
        """The version being sent: whole, or for receivers that hold ``base`` as an update."""
        assert self._manifest is not None
        if not sparse or self._base is None or self._base[1] is self._shown:
            return updates.whole(self._manifest, self._shown)
        if self._update is None:
            self._update = updates.since(*self._base, self._manifest, self._shown)
        return self._update
