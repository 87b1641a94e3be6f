"""The way of finished groups to the broker: those that are finished while a push is under way go together next."""

from __future__ import annotations

import asyncio
from collections import deque

from broker.contract import PushOutcome
from broker.errors import BufferFull, Refused
from broker.messages import Group
from broker.rules import GROUPS_PER_CALL
from generators.broker_thread import BrokerThread


class Deliveries:
    """Pushes in the order in which they were asked for; a release does not wait for them.

    Args:
        thread: whose calls may wait for room in the buffer.
        releases: for the rest.
    """

    def __init__(self, thread: BrokerThread, releases: BrokerThread) -> None:
        self._thread, self._releases = thread, releases
        self._waiting: deque[tuple[Group, asyncio.Future[PushOutcome]]] = deque()
        self._pushing: asyncio.Task[None] | None = None

    async def push(self, group: Group) -> PushOutcome:
        """What became of the group. Cancelling the await takes it back, unless it is under way."""
        outcome: asyncio.Future[PushOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, outcome))
        if self._pushing is None or self._pushing.done():
            self._pushing = asyncio.create_task(self._push_waiting())
        return await outcome

    async def release(self, *, lease_id: str, error: str) -> None:
        """See broker.contract.Broker."""
        await self._releases.call(lambda broker: broker.release(lease_id=lease_id, error=error))

    def close(self) -> None:
        """Closes the client behind the push under way, without waiting; pushes whose turn has not come fail."""
        self._thread.close()

    async def _push_waiting(self) -> None:
        while self._waiting:
            together = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUPS_PER_CALL))]
            try:
                await self._push(together)
            except Refused:  # because of one of them: each that has no outcome finds out for itself
                for one in together:
                    await self._push([one])

    async def _push(self, waiting: list[tuple[Group, asyncio.Future[PushOutcome]]]) -> None:
        """Settles these, also with an error; one that may be of another group among them is only raised."""
        wanted = [(group, outcome) for group, outcome in waiting if not outcome.done()]
        groups = [group for group, _ in wanted]
        if not groups:
            return
        try:
            found = await self._thread.call(lambda broker: broker.push_all(groups))
        except Exception as error:  # handed to whoever awaits the outcome
            settled = error.settled if isinstance(error, Refused | BufferFull) else {}
            left = [outcome for i, (_, outcome) in enumerate(wanted) if i not in settled]
            for i, one in settled.items():
                _settle(wanted[i][1], one)
            if isinstance(error, Refused) and len(left) > 1:
                raise
            for outcome in left:
                if not outcome.done():
                    outcome.set_exception(error)
        else:
            for (_, outcome), one in zip(wanted, found, strict=True):
                _settle(outcome, one)


def _settle(outcome: asyncio.Future[PushOutcome], found: PushOutcome) -> None:
    if not outcome.done():
        outcome.set_result(found)
