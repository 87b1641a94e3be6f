"""The way of finished groups to the broker: those that are finished while a push is under way go together next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from broker.contract import PushOutcome
from broker.errors import Refused
from broker.messages import Group
from broker.rules import GROUPS_PER_CALL
from generators.broker_thread import BrokerThread


class Deliveries:
    """Pushes in the order in which they were asked for; a release does not wait for the pushes before it."""

    def __init__(self, thread: BrokerThread) -> None:
        self._thread = thread
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
        await self._thread.call(lambda broker: broker.release(lease_id=lease_id, error=error))

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
            _settle(wanted, await self._thread.call(lambda broker: broker.push_all(groups)))
        except Exception as error:  # handed to whoever awaits the outcome
            if isinstance(error, Refused) and len(wanted) > 1:
                _settle(wanted, error.settled)
                raise
            for _, outcome in wanted:
                if not outcome.done():
                    outcome.set_exception(error)


def _settle(wanted: Sequence[tuple[Group, asyncio.Future[PushOutcome]]], found: Sequence[PushOutcome]) -> None:
    """Tells the first ones what became of their groups."""
    for (_, outcome), one in zip(wanted, found, strict=False):
        if not outcome.done():
            outcome.set_result(one)
