"""The groups under way: their leases, their tasks, and which of them the engine still samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from broker.messages import Lease


class Running:
    """Lives on one event loop. ``changed``: called when one has been sampled or has ended."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tasks: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._sampling: set[str] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def leases(self) -> tuple[str, ...]:
        """Ids of all of them."""
        return tuple(self._tasks)

    def sampling(self, which: Callable[[Lease], bool]) -> list[str]:
        """Ids of those that the engine has not answered yet."""
        return [lease_id for lease_id in self._sampling if which(self._tasks[lease_id][0])]

    def add(self, lease: Lease, task: asyncio.Task[None]) -> None:
        """From now on it is under way, until ``ended``."""
        self._tasks[lease.lease_id] = (lease, task)
        self._sampling.add(lease.lease_id)

    def sampled(self, lease_id: str) -> None:
        """The engine has answered."""
        self._sampling.discard(lease_id)
        self._changed()

    def ended(self, lease_id: str) -> None:
        """It has been pushed, or given back."""
        self._tasks.pop(lease_id, None)
        self.sampled(lease_id)

    async def cancel(self, lease_ids: Iterable[str]) -> list[Lease]:
        """Ends those of them that are still under way and returns their leases."""
        doomed = [self._tasks[lease_id] for lease_id in lease_ids if lease_id in self._tasks]
        for _, task in doomed:
            task.cancel()
        await asyncio.gather(*(task for _, task in doomed), return_exceptions=True)
        return [lease for lease, _ in doomed]
