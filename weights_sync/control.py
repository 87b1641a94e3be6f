"""The few words that learner and receivers exchange about an attempt, as keys in the learner's store.

    receiver: here -> (transfer) -> settled            learner: (all here) -> transfer -> verdict
    another learner rank: ready -> (its transfer) -> sent, and a beat all the time

A store's client serves one call at a time, waiting calls included: who waits in one must not share it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from broker.messages import Member, Publication
from weights_sync.errors import SyncFailed

SENT, ABANDONED = "sent", "abandoned"  # verdicts
_NEWEST_ORDER = "order/newest"
STAGED = "ok"  # what a receiver settles with; anything else is its error
FATAL = "fatal: "  # begins what a learner rank says of its part that no other attempt can mend
_OF_ATTEMPT = re.compile(r"(?:here|verdict|settled|ready|sent)/(\d+)[./]")
_OF_EPOCH = re.compile(r"epoch(\d+)\.")  # groups.group_name


def here_key(attempt: int, rank: int, part: int = 0) -> str:
    """Set when receiver ``rank`` is ready for a part: nobody enters a collective that someone is missing from."""
    return f"here/{attempt}.{part}/{rank}"


def verdict_key(attempt: int, rank: int) -> str:
    """Where receiver ``rank`` learns how the attempt ended for the learner."""
    return f"verdict/{attempt}/{rank}"


def settled_key(attempt: int, rank: int) -> str:
    """Where receiver ``rank`` says how the attempt ended for it."""
    return f"settled/{attempt}/{rank}"


def sent_key(attempt: int, part: int) -> str:
    """Where the learner rank that sends a part says how that ended: STAGED or its error."""
    return f"sent/{attempt}/{part}"


def ready_key(attempt: int, part: int) -> str:
    """Set when a part is sealed: from then on its sender waits for receivers, not they for it."""
    return f"ready/{attempt}/{part}"


def beat_key(part: int) -> str:
    """Where the learner rank that sends a part counts on as long as it is neither stopped nor hung."""
    return f"beat/{part}"


def order_key(number: int) -> str:
    """Where rank 0 tells the other learner ranks what to send next; numbered from 1."""
    return f"order/{number}"


def newest_order(store: TCPStore) -> int:
    """The number of the newest order, 0 before the first."""
    return int(store.get(_NEWEST_ORDER)) if store.check([_NEWEST_ORDER]) else 0


def wait_here(store: TCPStore, attempt: int, ranks: Sequence[int], timeout_s: float, part: int = 0) -> None:
    """Waits until all receivers are there. Raises SyncFailed naming the ranks that are not."""
    try:
        store.wait([here_key(attempt, rank, part) for rank in ranks], timedelta(seconds=timeout_s))
    except DistStoreError:
        missing = [str(rank) for rank in ranks if not store.check([here_key(attempt, rank, part)])]
        raise SyncFailed(
            f"rank {', '.join(missing)} did not come (deadline: weights_sync.sync_timeout_s = {timeout_s:g})"
        ) from None


def is_sent(text: str) -> bool:
    """Whether that is what another learner rank says of a part that it has sent."""
    return text.split(" ", 1)[0] == STAGED


@dataclass(kw_only=True)
class Attempt:
    """One try at sending, as the learner sees it.

    Attributes:
        members: the receivers in rank order, as they were when it began.
        refused: what no other attempt can mend.
        others: what the other learner ranks said of their parts.
        announced: receivers can know of it.
        over: decided; whatever its transfer thread still does counts for nothing.
    """

    publication: Publication
    members: tuple[Member, ...]
    sent: bool = False
    error: str = ""
    refused: str = ""
    announced: bool = False
    over: bool = False
    others: tuple[str, ...] = ()
    moved_at: float = field(default_factory=time.monotonic)

    def moved(self) -> None:
        """Notes that the transfer got on."""
        self.moved_at = time.monotonic()

    def ranks(self) -> Iterable[tuple[int, Member]]:
        """(rank, receiver), from rank 1."""
        return enumerate(self.members, start=1)

    @property
    def rank_numbers(self) -> range:
        """The receivers' ranks."""
        return range(1, len(self.members) + 1)


class Control:
    """The learner's side, over a client that never waits."""

    def __init__(self, store: TCPStore, *, parts: int = 1) -> None:
        self._store, self._parts, self._orders = store, parts, 0

    def decide(self, attempt: int, ranks: Iterable[int], verdict: str) -> None:
        """Tells every receiver; an abandoned attempt also releases whoever waits for receivers to come."""
        for rank in ranks:
            self._store.set(verdict_key(attempt, rank), verdict)
            for part in range(self._parts) if verdict == ABANDONED else ():
                self._store.set(here_key(attempt, rank, part), "")

    def settled(self, attempt: int, ranks: Iterable[int]) -> dict[int, str]:
        """What each receiver that has settled said."""
        return {
            rank: self._store.get(settled_key(attempt, rank)).decode()
            for rank in ranks
            if self._store.check([settled_key(attempt, rank)])
        }

    def sweep(self, *, attempt: int, epoch: int) -> None:
        """Removes the keys of attempts and epochs before these, also of who came late to them.

        Without it the store would grow by a dozen keys with every generator that comes or goes.
        """
        for key in self._store.list_keys():
            of_attempt, of_epoch = _OF_ATTEMPT.match(key), _OF_EPOCH.match(key)
            if (of_attempt and int(of_attempt[1]) < attempt) or (of_epoch and int(of_epoch[1]) < epoch):
                self._store.delete_key(key)

    def order(self, order: str) -> None:
        """Tells the other learner ranks what to send; the order before the last is forgotten."""
        if self._parts > 1:
            self._orders += 1
            self._store.set(order_key(self._orders), order)
            self._store.set(_NEWEST_ORDER, str(self._orders))
            self._store.delete_key(order_key(self._orders - 2))

    def sent(self, attempt: int) -> dict[int, str]:
        """What each other learner rank that has ended its part said."""
        return {
            part: self._store.get(sent_key(attempt, part)).decode()
            for part in range(1, self._parts)
            if self._store.check([sent_key(attempt, part)])
        }

    def came(self, attempt: int, part: int, ranks: Iterable[int]) -> list[int]:
        """The receivers that are there for a part; after an abandoned attempt's verdict, all."""
        return [rank for rank in ranks if self._store.check([here_key(attempt, rank, part)])]

    def ready(self, attempt: int, part: int) -> bool:
        """Whether another learner rank has sealed its part."""
        return self._store.check([ready_key(attempt, part)])

    def beats(self) -> dict[int, str]:
        """How far each other learner rank has counted."""
        keys = {part: beat_key(part) for part in range(1, self._parts)}
        return {part: self._store.get(key).decode() for part, key in keys.items() if self._store.check([key])}
