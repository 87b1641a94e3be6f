"""Where a transfer is at the moment of a signal: a look into the learner's end, and a trigger on its broadcasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from broker.messages import Publication
from weights_sync import part_sender, transfer
from weights_sync.groups import Group


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A signal that was sent. ``hit``: while a transfer to its target was under way. ``update``: of a sparse one."""

    hit: bool
    update: bool
    broadcast: int


class Tap:
    """Between ``open`` and ``close`` every broadcast of the learner goes through here.

    ``sent``: transfers that were begun, by whether they were updates.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publication: Publication | None = None
        self._base, self._broadcasts = -1, 0
        self._armed: tuple[str, int, Callable[[], None]] | None = None
        self._send, self._broadcast = transfer.send, Group.broadcast
        self._fired = threading.Event()
        self._shot: Shot | None = None
        self.sent = {True: 0, False: 0}

    def open(self) -> None:
        """From here on it sees."""
        tap, broadcast = self, self._broadcast

        def seen(group: Group, tensor: Tensor) -> None:
            tap._before_broadcast()
            broadcast(group, tensor)

        part_sender.send = self._sending  # type: ignore[assignment]
        Group.broadcast = seen  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        """Everything is as before."""
        part_sender.send = self._send  # type: ignore[assignment]
        Group.broadcast = self._broadcast  # type: ignore[method-assign]

    def arm(self, target: str, broadcasts: int, fire: Callable[[], None]) -> None:
        """Calls ``fire`` before the ``broadcasts``-th broadcast from now on that member ``target`` takes part in."""
        with self._lock:
            self._fired.clear()
            self._armed = (target, broadcasts, fire)

    def fired(self) -> Shot | None:
        """What became of ``arm``; None as long as it waits."""
        return self._shot if self._fired.is_set() else None

    def shoot(self, target: str, fire: Callable[[], None]) -> Shot:
        """Calls ``fire`` now, whatever is under way."""
        with self._lock:
            return self._fire(target, fire)

    def _fire(self, target: str, fire: Callable[[], None]) -> Shot:
        at = self._publication
        fire()
        hit = at is not None and target in at.receivers
        return Shot(hit=hit, update=self._base >= 0, broadcast=self._broadcasts)

    def _before_broadcast(self) -> None:
        with self._lock:
            self._broadcasts += 1
            if self._armed is None or self._publication is None:
                return
            target, left, fire = self._armed
            if target not in self._publication.receivers:
                return
            self._armed = (target, left - 1, fire) if left > 1 else None
            if left <= 1:
                self._shot = self._fire(target, fire)
                self._fired.set()

    def _sending(self, group: Group, publication: Publication, payload: Any, **more: Any) -> None:
        with self._lock:
            self._publication, self._base, self._broadcasts = publication, payload.manifest.base, 0
            self.sent[payload.manifest.base >= 0] += 1
        try:
            self._send(group, publication, payload, **more)
        finally:
            with self._lock:
                if self._publication is publication:
                    self._publication = None
