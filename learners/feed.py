"""Rank 0's side of the broker: keeps it fed, and has the next batch ready while the present one is trained.

    prompts ─top up─► broker ─take_batch─► slot (one batch) ─take─► the loop ─trained─► broker

A thread with its own client does the first three arrows. It waits in ``take_batch`` (woken by a finished group) or for
the slot to be free (woken by ``take``); the loop waits in ``take``. Whatever ends the thread is raised by ``take``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from broker.contract import Broker
from broker.errors import BrokerClosed, NoOpenRun, SlipstreamError
from broker.messages import Batch, Frontier, Prompt, Rules, RunState

log = logging.getLogger(__name__)

_SLICE_S = 0.5  # longest uninterrupted wait in the broker
_FED_AHEAD = 3  # windows of prompts that have not ended: one outstanding and two queued behind it


class EndOfData(SlipstreamError):
    """The prompts are used up; what is left of them is less than a batch, and is not trained."""


class NoProgress(SlipstreamError):
    """No group has arrived for ``launch.watchdog_s``."""


class BatchFeed:
    """Opens the run, and from then on answers ``take``.

    Args:
        connect: opens a broker client; called once for each of the two threads.
        prompts: the prompts after a data position, in order.
        version, frontier: where the run starts from.
        total_steps: no batch is taken for this version or later ones.
        after: the last incarnation that this run is known to have had.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Broker],
        prompts: Callable[[Frontier], Iterator[Prompt]],
        rules: Rules,
        version: int,
        frontier: Frontier,
        total_steps: int,
        watchdog_s: float,
        after: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._connect, self._prompts, self._rules = connect, prompts, rules
        self._total_steps, self._watchdog_s = total_steps, watchdog_s
        self._broker = connect()
        self.frontier, self._saved, self._version = frontier, frontier, version
        self.incarnation = self._open_run(after)
        self._changed = threading.Condition()
        self._source: Iterator[Prompt] | None = prompts(frontier)
        self._ahead = 0
        self._hand: Batch | None = None
        self._slot: Batch | None = None
        self._failure: BaseException | None = None
        self._lost = self._closed = False
        self._openings = 0  # +1 whenever the run was opened again
        self._moved, self._seen = self._clock(), (0, 0)
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    # -- the loop's thread -------------------------------------------------------------------------------------
    def take(self, version: int, wait_s: float) -> Batch | None:
        """The batch to train at ``version``, the same one until ``trained``; None when there is none after ``wait_s``.

        Raises NoProgress, EndOfData, RunFinished, or whatever broker error ended the thread.
        """
        if self._hand is not None:
            return self._hand
        with self._changed:
            self._changed.wait_for(lambda: self._slot or self._failure or self._lost, wait_s)
            if self._slot is not None:
                assert self._slot.version == version, (self._slot.version, version)
                self._hand, self._slot = self._slot, None
                self._moved = self._clock()
                self._changed.notify_all()
                return self._hand
            if self._failure is not None:
                raise self._failure
            if self._lost:
                self._reopen()
        self._check_progress()
        return None

    def trained(self, version: int) -> None:
        """The batch in hand has become part of ``version``."""
        batch = self._hand
        assert batch is not None
        positions = [group.prompt.position for group in batch.groups] + [one.position for one in batch.ended]
        try:
            self._broker.trained(batch_id=batch.batch_id, version=version)
        except NoOpenRun:
            self._lost = True
        with self._changed:
            self.frontier = self.frontier.with_ended(positions)
            self._hand, self._version, self._ahead = None, version, self._ahead - len(positions)
            self._changed.notify_all()

    def durable(self, version: int, frontier: Frontier) -> None:
        """A checkpoint of ``version`` is complete, with the data position that it holds."""
        self._saved = frontier
        try:
            self._broker.durable(version=version)
        except NoOpenRun:
            self._lost = True  # the checkpoint's own frontier is what counts

    def look(self) -> RunState:
        """The broker's state."""
        return self._broker.state()

    def finish(self, reason: str) -> None:
        """Ends the run for everyone."""
        self._broker.finish(reason)

    def close(self) -> None:
        """Stops the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=4 * _SLICE_S)
        self._broker.close()

    def _open_run(self, after: int) -> int:
        return self._broker.open_run(
            rules=self._rules,
            version=self._version,
            frontier=self.frontier,
            after=after,
            unsaved=self.frontier.size - self._saved.size,
        )

    def _reopen(self) -> None:
        """The broker came back without its memory: opens the run where the learner is, and has all fed again.

        No batch is out at this moment, so nothing is trained twice. The incarnation is brought back to what
        generators and publisher know. Both threads may notice the same loss, one of them late: then the run is open
        already, and only what that thread was about to feed is missing. Caller holds the lock.
        """
        self._openings += 1
        state = self._broker.state()
        if state.rules is None or (state.incarnation, state.version) != (self.incarnation, self._version):
            log.warning("the broker has lost its memory: opening the run again at version %d", self._version)
            self._open_run(self.incarnation - 1)
        self._source, self._ahead, self._lost = self._prompts(self.frontier), 0, False
        self._changed.notify_all()

    def _check_progress(self) -> None:
        """Raises NoProgress when no group has come in for the watchdog's time."""
        if self._lost:
            return
        try:
            state = self._broker.state()
        except NoOpenRun:
            return
        counts = state.counts
        seen = (counts.buffered + counts.training + counts.trained + counts.durable, state.version)
        if seen != self._seen:
            self._seen, self._moved = seen, self._clock()
        if self._clock() - self._moved > self._watchdog_s:
            raise NoProgress(f"no group for launch.watchdog_s = {self._watchdog_s:g} s; {describe(state)}")

    # -- the feed's thread -------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            broker = self._connect()
            while (version := self._next_version()) is not None:
                try:
                    self._advance(broker, version)
                except NoOpenRun:
                    self._tell(lost=True)
            broker.close()
        except BrokerClosed:
            return
        except BaseException as error:  # raised again by take, in the thread that can end the process
            self._tell(failure=error)

    def _next_version(self) -> int | None:
        """The version that the next batch is for, once there is room for it; None when closing."""
        with self._changed:
            while not self._closed:
                version = self._version + (self._hand is not None)
                if self._slot is None and not self._lost and version < self._total_steps:
                    return version
                self._changed.wait()
        return None

    def _advance(self, broker: Broker, version: int) -> None:
        """Feeds, then waits a little for the batch."""
        with self._changed:
            openings = self._openings
        self._top_up(broker)
        batch = broker.take_batch(version=version, wait_s=_SLICE_S)
        if batch is not None:
            with self._changed:
                if openings == self._openings:  # else it is of a broker that has forgotten it since
                    self._slot = batch
                    self._changed.notify_all()
        elif self._source is None:
            state = broker.state()
            if state.rules is None or openings != self._openings:  # its empty books are no end of the data
                raise NoOpenRun("the broker came back without its memory")
            counts = state.counts
            left = counts.queued + counts.leased + counts.buffered
            if left < self._rules.groups_per_step and self._hand is None:
                raise EndOfData(f"the prompts have ended; {left} that do not fill a batch are left out")

    def _top_up(self, broker: Broker) -> None:
        with self._changed:
            source, room = self._source, _FED_AHEAD * self._rules.window - self._ahead
        if source is None or room <= 0:
            return
        prompts = [prompt for _, prompt in zip(range(room), source, strict=False)]
        broker.feed(prompts)
        with self._changed:
            if source is not self._source:  # opened again meanwhile: these will come once more
                return
            self._ahead += len(prompts)
            if len(prompts) < room:
                self._source = None

    def _tell(self, *, lost: bool = False, failure: BaseException | None = None) -> None:
        with self._changed:
            self._lost, self._failure = self._lost or lost, self._failure or failure
            self._changed.notify_all()


def describe(state: RunState) -> str:
    """Where everyone stands, for the error of a run that does not move (C42)."""
    counts = state.counts
    members = [
        f"{one.member_id} {one.state.value} at version {one.policy_version}" + (f" ({one.error})" if one.error else "")
        for one in state.members
    ]
    return (
        f"learner at version {state.version}; {counts.queued} prompts queued, {counts.leased} leased, "
        f"{counts.buffered} buffered, dead: {counts.dead or 'none'}, events: {counts.events or 'none'}; "
        f"members: {'; '.join(members) or 'none'}"
    )
