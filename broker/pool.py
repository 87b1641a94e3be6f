"""Prompts that wait for a lease or are leased: the part of the ledger that training and evaluation share."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from broker.messages import Lease, Prompt


@dataclass(slots=True)
class Item:
    """A prompt whose answer is still wanted."""

    prompt: Prompt
    failed_attempts: int = 0
    error: str = ""


@dataclass(slots=True)
class Grant:
    """A lease as the ledger keeps it: with its holder, the version the holder began with, and its end."""

    lease: Lease
    member_id: str
    policy_version: int
    expires_at: float

    @property
    def item(self) -> str:
        """The id of the leased prompt."""
        return self.lease.prompt.item


@dataclass(slots=True)
class Pool:
    """Items, the queue of those to lease (lowest position first) and the leases.

    A prompt that comes back is older than all that wait, so it goes first: the order is by position.
    ``_heap`` and ``_ends`` may hold entries that no longer hold; ``queued`` and ``grants`` are the truth.
    """

    items: dict[str, Item] = field(default_factory=dict)
    queued: set[str] = field(default_factory=set)
    grants: dict[str, Grant] = field(default_factory=dict)
    _heap: list[tuple[int, str]] = field(default_factory=list)
    _ends: list[tuple[float, str]] = field(default_factory=list)

    def add(self, prompt: Prompt) -> None:
        """Takes in a new prompt and queues it."""
        self.items[prompt.item] = Item(prompt)
        self.queue(prompt.item)

    def queue(self, item: str) -> None:
        """Makes the item leasable again."""
        if item not in self.queued:
            self.queued.add(item)
            heapq.heappush(self._heap, (self.items[item].prompt.position, item))

    def forget(self, item: str) -> Item | None:
        """Drops the item, wherever in this pool it is."""
        self.queued.discard(item)
        return self.items.pop(item, None)

    def grant(
        self, *, lease_id: str, member_id: str, policy_version: int, incarnation: int, expires_at: float
    ) -> Lease:
        """Leases the first queued prompt; there must be one."""
        item = self.items[self._pop()]
        lease = Lease(lease_id=lease_id, prompt=item.prompt, attempt=item.failed_attempts + 1, incarnation=incarnation)
        self.grants[lease_id] = Grant(lease, member_id, policy_version, expires_at)
        heapq.heappush(self._ends, (expires_at, lease_id))
        return lease

    def renew(self, lease_id: str, *, member_id: str, expires_at: float) -> None:
        """Moves the end of a lease that this member holds."""
        grant = self.grants.get(lease_id)
        if grant is not None and grant.member_id == member_id:
            grant.expires_at = max(grant.expires_at, expires_at)

    def give_back(self, lease_id: str, *, error: str, max_attempts: int) -> Item | None:
        """Ends a lease unanswered. With an error the attempt counts; the item is returned if that was its last."""
        grant = self.grants.pop(lease_id)
        item = self.items[grant.item]
        if error:
            item.failed_attempts += 1
            item.error = error
            if item.failed_attempts >= max_attempts:
                return self.forget(grant.item)
        self.queue(grant.item)
        return None

    def expired(self, now: float) -> list[Grant]:
        """The leases that have ended by ``now``; the caller gives them back."""
        ended: list[Grant] = []
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heapq.heappop(self._ends)
            grant = self.grants.get(lease_id)
            if grant is not None and grant.expires_at > now:  # renewed since this entry was made
                heapq.heappush(self._ends, (grant.expires_at, lease_id))
            elif grant is not None:
                ended.append(grant)
        return ended

    def next_end(self) -> float | None:
        """When to look for expired leases next; never later than the first one's end."""
        while self._ends and self._ends[0][1] not in self.grants:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def _pop(self) -> str:
        while True:
            _, item = heapq.heappop(self._heap)
            if item in self.queued:
                self.queued.remove(item)
                return item
