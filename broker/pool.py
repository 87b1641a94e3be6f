"""Prompts that wait for a lease or are leased: the part of the ledger that training and evaluation share."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from broker.heads import LeaseHead, position_of
from broker.rows import Rows


@dataclass(frozen=True)
class Item:
    """A prompt whose answer is still wanted."""

    prompt: bytes
    failed_attempts: int = 0
    error: str = ""


@dataclass(frozen=True)
class Grant:
    """A lease as the ledger keeps it. ``token``: of the call that asked for it, which may be sent again."""

    item: str
    member_id: str
    policy_version: int
    incarnation: int
    attempt: int
    token: str


class Pool:
    """Items, the queue of those to lease (lowest position first) and the leases.

    A prompt that comes back is older than all that wait, so it goes first: the order is by position.
    ``_heap`` and ``_ends`` may hold entries that no longer hold; ``queued`` and ``grants`` are the truth.
    """

    def __init__(self) -> None:
        self.items: Rows[str, Item] = Rows()
        self.grants: Rows[str, Grant] = Rows()
        self.queued: set[str] = set()
        self._heap: list[tuple[int, str]] = []
        self._expires_at: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []
        self._by_token: dict[str, list[str]] = {}

    def add(self, item: str, prompt: bytes) -> None:
        """Takes in a new prompt and queues it."""
        self.items[item] = Item(prompt)
        self.queue(item)

    def queue(self, item: str) -> None:
        """Makes the item leasable again."""
        if item not in self.queued:
            self.queued.add(item)
            heapq.heappush(self._heap, (position_of(item), item))

    def forget(self, item: str) -> Item | None:
        """Drops the item, wherever in this pool it is."""
        self.queued.discard(item)
        return self.items.take(item)

    def forget_all(self) -> None:
        """Empties the pool."""
        self.items.remove_all()
        self.grants.remove_all()
        for container in (self.queued, self._heap, self._expires_at, self._ends, self._by_token):
            container.clear()

    def grant(
        self, *, lease_id: str, member_id: str, policy_version: int, incarnation: int, expires_at: float, token: str
    ) -> LeaseHead:
        """Leases the first queued prompt; there must be one."""
        item = self._pop()
        attempt = self.items[item].failed_attempts + 1
        self.grants[lease_id] = Grant(item, member_id, policy_version, incarnation, attempt, token)
        self._by_token.setdefault(token, []).append(lease_id)
        self._end_at(lease_id, expires_at)
        return LeaseHead(lease_id=lease_id, item=item, attempt=attempt)

    def granted(self, token: str) -> list[LeaseHead]:
        """The leases that the call with this token was given, as far as they still hold."""
        held = [(lease_id, self.grants[lease_id]) for lease_id in self._by_token.get(token, ())]
        return [LeaseHead(lease_id=one, item=grant.item, attempt=grant.attempt) for one, grant in held]

    def renew(self, lease_id: str, *, member_id: str, expires_at: float) -> None:
        """Moves the end of a lease that this member holds."""
        grant = self.grants.get(lease_id)
        if grant is not None and grant.member_id == member_id:
            self._expires_at[lease_id] = max(self._expires_at[lease_id], expires_at)

    def end(self, lease_id: str) -> Grant:
        """Ends a lease that holds, whatever has become of its prompt."""
        grant = self.grants[lease_id]
        del self.grants[lease_id], self._expires_at[lease_id]
        same_call = self._by_token[grant.token]
        same_call.remove(lease_id)
        if not same_call:
            del self._by_token[grant.token]
        return grant

    def put_back(self, item: str, *, error: str, max_attempts: int) -> tuple[str, Item] | None:
        """Queues an item again. With an error the attempt counts; the item is returned if that was its last."""
        if error:
            failed = replace(self.items[item], failed_attempts=self.items[item].failed_attempts + 1, error=error)
            self.items[item] = failed
            if failed.failed_attempts >= max_attempts:
                self.forget(item)
                return item, failed
        self.queue(item)
        return None

    def expired(self, now: float) -> list[str]:
        """The leases that have ended by ``now``; the caller gives them back."""
        ended: list[str] = []
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heapq.heappop(self._ends)
            expires_at = self._expires_at.get(lease_id)
            if expires_at is not None and expires_at > now:  # renewed since this entry was made
                heapq.heappush(self._ends, (expires_at, lease_id))
            elif expires_at is not None:
                ended.append(lease_id)
        return ended

    def next_end(self) -> float | None:
        """When to look for expired leases next; never later than the first one's end."""
        while self._ends and self._ends[0][1] not in self.grants:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def restored(self, *, elsewhere: set[str], expires_at: float) -> None:
        """After items and grants were read back: queues what is neither leased nor ``elsewhere``, renews all leases."""
        for lease_id, grant in self.grants.items():
            self._by_token.setdefault(grant.token, []).append(lease_id)
            self._end_at(lease_id, expires_at)
        for item in self.items.keys() - elsewhere - {grant.item for grant in self.grants.values()}:
            self.queue(item)

    def _end_at(self, lease_id: str, expires_at: float) -> None:
        self._expires_at[lease_id] = expires_at
        heapq.heappush(self._ends, (expires_at, lease_id))

    def _pop(self) -> str:
        while True:
            _, item = heapq.heappop(self._heap)
            if item in self.queued:
                self.queued.remove(item)
                return item
