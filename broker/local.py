"""The broker within one process: the ledger behind a lock, for the serial mode and for tests of the roles' logic."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from broker.caller import Caller, fresh_token
from broker.calls import PENDING, Bodies, Call, answer
from broker.config import BrokerConfig
from broker.ledger import Ledger

T = TypeVar("T")


class LocalBroker(Caller):
    """Each thread takes its own ``client()``; all of them see one ledger.

    Waits are woken by every change of the ledger, or by the next lease or member to expire.
    ``clock`` is the ledger's time in seconds; ``wait_s`` is always real time.
    """

    def __init__(
        self,
        config: BrokerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        token: Callable[[], str] = fresh_token,
        shared: tuple[Ledger, threading.Condition] | None = None,
    ) -> None:
        super().__init__(config or BrokerConfig(), token=token)
        self._clock = clock
        self.ledger, self._changed = shared or (Ledger(), threading.Condition())

    def client(self) -> LocalBroker:
        """Another client of the same ledger."""
        return LocalBroker(self._config, clock=self._clock, token=self._token, shared=(self.ledger, self._changed))

    def _exchange(self, call: Call[T], bodies: Bodies, wait_s: float) -> tuple[T, Bodies]:
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                changes, left = self.ledger.changes, deadline - time.monotonic()
                try:
                    found = answer(self.ledger, call, bodies, now=self._clock(), last=left <= 0)
                finally:
                    if self.ledger.changes != changes:
                        self._changed.notify_all()
                if found is not PENDING:
                    return found
                self._changed.wait(self._pause(left))

    def _pause(self, left: float) -> float:
        due = self.ledger.next_deadline()
        return left if due is None else max(0.001, min(left, due - self._clock()))
