"""Watches a run from beside it: the broker's state and the metrics file, for the view and for the watchdog."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from broker.contract import Broker
from broker.errors import BrokerError
from broker.messages import RunState
from telemetry.live import Progress, View
from telemetry.plain import plain
from telemetry.tail import Tail

_LOG = logging.getLogger(__name__)


class Monitor:
    """A thread with a broker client of its own. It ends with the context; what it last saw stays readable."""

    def __init__(
        self, connect: Callable[[], Broker], logs: Path, progress: Progress, view: View, *, refresh_s: float
    ) -> None:
        self._connect = connect
        self._metrics = Tail(logs / "metrics.jsonl")
        self._evals = Tail(logs / "eval.jsonl")
        self._progress = progress
        self._view = view
        self._refresh_s = refresh_s
        self._closing = threading.Event()
        self._moved = time.monotonic()
        self._seen: object = None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(timeout=self._refresh_s + 0.7)  # of the ten seconds that a stop may take

    @property
    def state(self) -> RunState | None:
        """The broker's state as last seen."""
        return self._progress.state

    def last_progress(self) -> float:
        """When something last moved, on the monotonic clock."""
        return self._moved

    def obstacle(self) -> str:
        """What seems to be in the way, for the error of a run that stands still."""
        state = self._progress.state
        if state is None:
            return "the broker has not been heard of"
        counts = state.counts
        members = [
            plain(f"{m.member_id} {m.state.value} at version {m.policy_version}" + (f" ({m.error})" if m.error else ""))
            for m in state.members
        ]
        return (
            f"learner at version {state.version}; {counts.queued} queued, {counts.leased} leased, "
            f"{counts.buffered} buffered; members: {'; '.join(members) or 'none'}"
        )

    def _run(self) -> None:
        try:
            client = self._connect()
            with self._view:
                while not self._closing.is_set():
                    self._look(client.state(after_revision=self._revision(), wait_s=self._refresh_s))
                self._look(client.state())
            client.close()
        except BrokerError as error:  # the roles meet the same and say so; without them the watchdog ends the run
            _LOG.warning("monitor: %s: %s", type(error).__name__, error)

    def _look(self, state: RunState) -> None:
        records, evals = self._metrics.read(), self._evals.read()
        counts = state.counts
        now = (
            state.version,
            (counts.fed, counts.buffered, counts.training, counts.trained, counts.durable),
            (sum(counts.filtered.values()), sum(counts.dead.values())),
            tuple((m.member_id, m.state, m.policy_version) for m in state.members),
        )
        if records or evals or now != self._seen:
            self._seen, self._moved = now, time.monotonic()
        self._progress.state = state
        self._progress.note = _note(state)
        self._progress.add(records)
        self._view.show(self._progress)

    def _revision(self) -> int:
        return self._progress.state.revision if self._progress.state else -1


def _note(state: RunState) -> str:
    if state.finished:
        return f"finished: {state.finished}"
    if state.incarnation < 0:
        return "the learner is starting"
    serves = any(m.role == "generator" and m.state != "gone" and m.policy_version >= 0 for m in state.members)
    return "" if serves else "no generator is serving yet"
