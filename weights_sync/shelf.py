"""Which staging slot holds what, decided on rank 0 for all learner ranks.

    reserve -> (every rank fills it) -> offered --promote--> shown --confirm--> base        the third slot is spare

Without sparse updates there is no base, and two slots do.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """A version in a slot."""

    slot: int
    version: int


class Shelf:
    """``reserve`` and ``offered`` are called by the learner's thread, all else by the publisher's."""

    def __init__(self, *, sparse: bool) -> None:
        self._sparse = sparse
        self._lock = threading.Lock()
        self._waiting: Place | None = None
        self._behind = 0  # slot for the next version
        self.shown: Place | None = None
        self.base: Place | None = None

    @property
    def waiting(self) -> int | None:
        """The version waiting to be sent, if any."""
        with self._lock:
            return self._waiting.version if self._waiting else None

    def reserve(self) -> int:
        """The slot to fill with the next version. One that still waits there to be sent is given up."""
        with self._lock:
            self._waiting = None
            return self._behind

    def offered(self, slot: int, version: int) -> None:
        """This rank has filled the slot."""
        with self._lock:
            self._waiting = Place(slot=slot, version=version)

    def promote(self) -> bool:
        """Makes the version that waits, if there is one, the version being sent."""
        with self._lock:
            if self._waiting is None:
                return False
            self.shown, self._waiting = self._waiting, None
            taken = {self.shown.slot, self.base.slot if self.base else -1}
            self._behind = min({0, 1, 2} - taken)
            return True

    def confirm(self) -> bool:
        """Every receiver holds the version being sent: the next one may be told as an update of it.

        Returns whether that is news.
        """
        if not self._sparse or self.shown is None or self.base == self.shown:
            return False
        with self._lock:
            self.base = self.shown
        return True
