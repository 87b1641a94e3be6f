"""Looks at the ledger all the time, whatever has just been killed: the books must balance in every look."""

from __future__ import annotations

import threading
import time

from broker.connect import connect
from broker.errors import BrokerUnreachable, SlipstreamError
from broker.messages import Counts, RunState
from tests.drills.setting import Setting

PAUSE_S = 0.01
PATIENCE_S = 1.0  # for a broker that is down, before the next look


class Observer:
    """A thread with a client of its own. ``ended``: the most positions that any look found trained or dead."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._broker = connect(setting.config(reconnect_timeout_s=PATIENCE_S), setting.url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self.looks = self.unreachable = self.ended = 0
        self.moved_at = time.monotonic()
        self.last: RunState | None = None
        self.wrong: list[str] = []

    def start(self) -> None:
        """From here on it looks."""
        self._thread.start()

    def close(self) -> None:
        """No look after this."""
        self._stop.set()
        self._thread.join(10 * PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            try:
                state = self._broker.state()
            except BrokerUnreachable:
                self.unreachable += 1
                continue
            except SlipstreamError as error:
                self._complain(f"{type(error).__name__}: {error}")
                continue
            self.looks += 1
            self._judge(state.counts)
            self.last = state
        self._broker.close()

    def _judge(self, counts: Counts) -> None:
        if not counts.balanced():
            self._complain(f"the books do not balance: {counts.total()} in {counts}")
        before = self.last.counts if self.last else counts
        if self._setting.disk and (counts.fed < before.fed or counts.durable < before.durable):
            self._complain(f"the broker has forgotten: {before} and then {counts}")
        ended = counts.trained + counts.durable + sum(counts.dead.values())
        if ended > self.ended:
            self.ended, self.moved_at = ended, time.monotonic()

    def _complain(self, text: str) -> None:
        self.wrong.append(f"look {self.looks}: {text}")
