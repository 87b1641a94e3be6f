"""One publication on its way in, and the seam to how its parts get here: joined.py and fetch.py."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from broker.messages import Publication
from weights_sync.manifest import Manifest

Room = Callable[[Manifest], Tensor]  # where a part's payload is to be put
ReceivePart = Callable[[int, Room], tuple[Manifest, Tensor]]


@dataclass(kw_only=True)
class Reception:
    """An attempt as its receiver sees it. ``ended`` is set once it is decided; ``moved_at``: when it last got on."""

    publication: Publication
    rank: int
    ended: threading.Event = field(default_factory=threading.Event)
    moved_at: float = field(default_factory=time.monotonic)

    def moved(self) -> None:
        """Notes that bytes have come."""
        self.moved_at = time.monotonic()

    def arrived(self) -> None:
        """All bytes are here; what is left takes as long as it takes."""
        self.moved_at = math.inf


class Source(Protocol):
    """Brings the parts of a publication. Serves one attempt after the other; an abandoned one may still be blocked."""

    def opened(self, attempt: Reception) -> AbstractContextManager[ReceivePart]:
        """[its thread] What receives part after part. Raises SyncFailed, RuntimeError, OSError, ValueError."""

    def watch(self, attempt: Reception) -> str:
        """[another thread] Waits until the attempt has ended, or has to: then returns why."""

    def settled(self, attempt: Reception, error: str) -> str:
        """[either thread] Tells the learner, where that is ours to do; returns the error as it is to be reported."""

    def leave(self, attempt: Reception) -> None:
        """Ends what waits for the learner."""
