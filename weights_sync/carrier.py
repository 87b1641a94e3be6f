"""The seam to how rank 0 gets a version to its receivers: weights_sync/collective.py, weights_sync/deposit.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from broker.contract import Broker
from broker.messages import Member
from weights_sync.control import Attempt
from weights_sync.manifest import Manifest
from weights_sync.updates import Payload


class Carrier(Protocol):
    """All but ``send`` is called by the publisher's own thread.

    Attributes:
        address: for ``Publication.store``.
        fetched: a version is announced once all of it lies ready, and receivers fetch it one without the other;
            else it is announced first, and all take part in sending it.
    """

    address: str
    fetched: bool

    def excuse(self, member: Member) -> str:
        """Why the member cannot be reached; empty if it can."""

    def needs_epoch(self, keys: tuple[tuple[str, int], ...]) -> bool:
        """Whether sending to these processes begins a new epoch."""

    def send(self, attempt: Attempt, payload: Payload) -> None:
        """[transfer thread] The blocking part, for rank 0's own part.

        Ends by itself at the latest with each operation's own deadline. Raises SyncFailed, RuntimeError, OSError,
        ValueError.
        """

    def decide(self, attempt: Attempt, verdict: str) -> None:
        """Tells the receivers how the sending ended."""

    def answers(self, attempt: Attempt, members: Sequence[Member]) -> Mapping[int, str]:
        """What receivers, by rank, have said of the attempt: STAGED or an error."""

    def patience_s(self, manifest: Manifest) -> float:
        """From the end of the sending to the report of a receiver that is alive."""

    def ended(self, attempt: Attempt, *, failed: bool) -> None:
        """The attempt is over."""

    def tidy(self, broker: Broker, readers: Iterable[Member]) -> None:
        """Removes what none of these generators may still want."""
