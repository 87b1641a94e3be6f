"""Sending over process groups: all receivers at once, in one epoch as long as nobody comes, goes or fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch._C._distributed_c10d import TCPStore

from broker.contract import Broker
from broker.messages import Member
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import Attempt, Control
from weights_sync.errors import SyncFailed
from weights_sync.groups import Group, check_reachable, join_store
from weights_sync.manifest import Manifest
from weights_sync.members import key
from weights_sync.part_sender import send_part
from weights_sync.updates import Payload


class Collective:
    """weights_sync.carrier.Carrier. A group that was part of a failed attempt is thrown away."""

    fetched = False

    def __init__(self, config: WeightsSyncConfig, address: str, control: Control, *, device: str) -> None:
        self.address = address
        self._config, self._control, self._device = config, control, device
        self._group: tuple[tuple[tuple[str, int], ...], TCPStore, Group] | None = None
        self._formed: dict[int, tuple[TCPStore, Group]] = {}  # by attempt; of the one under way

    def excuse(self, member: Member) -> str:
        """See weights_sync.carrier.Carrier."""
        try:
            check_reachable(self._config.host, member.host)
        except (SyncFailed, OSError) as error:
            return str(error)
        return ""

    def needs_epoch(self, keys: tuple[tuple[str, int], ...]) -> bool:
        """See weights_sync.carrier.Carrier."""
        if self._group is not None and self._group[0] != keys:
            self._group = None
        return self._group is None

    def send(self, attempt: Attempt, payload: Payload) -> None:
        """See weights_sync.carrier.Carrier."""
        publication, timeout_s = attempt.publication, self._config.sync_timeout_s
        # A client of our own store for each group, since it waits in it.
        store, group = self._group[1:] if self._group else (join_store(self.address, timeout_s), None)
        group = send_part(
            config=self._config, store=store, publication=publication, part=0, payload=payload, group=group,
            device=self._device, address=self._config.host, moved=attempt.moved, over=lambda: attempt.over,
        )  # fmt: skip
        if not attempt.over:
            self._formed = {publication.attempt: (store, group)}

    def decide(self, attempt: Attempt, verdict: str) -> None:
        """See weights_sync.carrier.Carrier."""
        self._control.decide(attempt.publication.attempt, attempt.rank_numbers, verdict)

    def answers(self, attempt: Attempt, members: Sequence[Member]) -> Mapping[int, str]:
        """See weights_sync.carrier.Carrier."""
        return self._control.settled(attempt.publication.attempt, attempt.rank_numbers)

    def patience_s(self, manifest: Manifest) -> float:
        """See weights_sync.carrier.Carrier. All of it has been received: what is left is the swap."""
        return self._config.in_use_timeout_s

    def ended(self, attempt: Attempt, *, failed: bool) -> None:
        """See weights_sync.carrier.Carrier."""
        formed = self._formed.get(attempt.publication.attempt)
        self._group = None if failed or formed is None else (tuple(key(m) for m in attempt.members), *formed)

    def tidy(self, broker: Broker, readers: Iterable[Member]) -> None:
        """See weights_sync.carrier.Carrier. Nothing lies anywhere."""
