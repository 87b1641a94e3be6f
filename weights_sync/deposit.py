"""Sending by a depot: rank 0 and the others leave their parts, then the version is announced and everyone fetches it.

What was left stays until every reader it was announced to has confirmed it: it reports that version or a newer one, or
that it could not use it, or it is gone or left out. That is one version most of the time; ``MOST`` bounds it. Where
there is no room for the next one, the oldest is given up: who is still to read it gets a newer one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.contract import Broker
from broker.messages import Member
from weights_sync.answers import answered
from weights_sync.config import RELAY_BUCKET_BYTES, WeightsSyncConfig
from weights_sync.control import Attempt
from weights_sync.depot import Connect, address, folder_at, open_depot
from weights_sync.errors import NO_ROOM, LayoutRefused, SyncFailed
from weights_sync.manifest import Manifest
from weights_sync.members import key
from weights_sync.parcel import folder_of, put_part, room_for
from weights_sync.staging import Declaration
from weights_sync.updates import Payload

log = logging.getLogger(__name__)

MOST = 4  # attempts that lie in the depot, the one under way included


@dataclass(frozen=True, kw_only=True)
class Left:
    """An attempt's folder and whom it is for; to everyone while it is not announced yet."""

    folder: str
    attempt: int
    version: int
    incarnation: int
    readers: frozenset[tuple[str, int]]

    def wanted_by(self, member: Member) -> bool:
        """Whether this process may still be reading it."""
        newer = member.incarnation == self.incarnation and member.policy_version >= self.version
        return key(member) in self.readers and not newer and answered(member) < self.attempt


class Deposit:
    """weights_sync.carrier.Carrier. Begins by removing what earlier incarnations of the run have left."""

    fetched = True

    def __init__(
        self, config: WeightsSyncConfig, connect: Connect, declaration: Declaration, *, run: str, incarnation: int
    ) -> None:
        self.address = address(config, run, incarnation)
        self._config, self._connect = config, connect
        self._folder = folder_at(self.address, config.transport)
        self._left: dict[int, Left] = {}
        depot = open_depot(config, connect, self._folder)
        try:
            # What can never be written is said before training begins.
            version, largest = room_for(config, declaration)
            most, bound = depot.capacity()
            if version > most:
                raise LayoutRefused(
                    f"a version of this model takes {version} bytes, more than {bound}: it needs as many, and twice "
                    "that for sending one while another is still read"
                )
            depot.sweep(())
            depot.put(f"{self._folder}/0/probe", bytes(min(largest, RELAY_BUCKET_BYTES)))
            depot.sweep(())
        finally:
            depot.close()

    def excuse(self, member: Member) -> str:
        """See weights_sync.carrier.Carrier. Whoever reaches the broker can report what else it cannot reach."""
        return ""

    def needs_epoch(self, keys: tuple[tuple[str, int], ...]) -> bool:
        """See weights_sync.carrier.Carrier. There are no groups."""
        return False

    def send(self, attempt: Attempt, payload: Payload) -> None:
        """See weights_sync.carrier.Carrier."""
        publication = attempt.publication
        if len(self._left) >= MOST:
            waiting = sorted({member_id for one in self._left.values() for member_id, _ in one.readers})
            raise SyncFailed(
                f"{MOST} versions wait in weights_sync.transport = {self._config.transport} for "
                f"{', '.join(waiting)}, which reported none of them within weights_sync.sync_timeout_s"
            )
        self._left[publication.attempt] = Left(
            folder=folder_of(publication, self._config.transport),
            attempt=publication.attempt,
            version=publication.version,
            incarnation=publication.incarnation,
            readers=frozenset(map(key, attempt.members)),
        )
        depot = open_depot(self._config, self._connect, self._folder)
        try:
            put_part(depot, self._config, publication, payload, moved=attempt.moved, over=lambda: attempt.over)
        finally:
            depot.close()

    def decide(self, attempt: Attempt, verdict: str) -> None:
        """See weights_sync.carrier.Carrier. What was not sent is not announced, so there is nobody to tell."""

    def answers(self, attempt: Attempt, members: Sequence[Member]) -> Mapping[int, str]:
        """See weights_sync.carrier.Carrier. The error is in the member's report, until its next success."""
        number, now = attempt.publication.attempt, {key(member): member for member in members}
        return {
            rank: now[key(member)].error
            for rank, member in attempt.ranks()
            if key(member) in now and answered(now[key(member)]) == number
        }

    def patience_s(self, manifest: Manifest) -> float:
        """See weights_sync.carrier.Carrier. Each read has the deadline; a reader that misses one says so itself."""
        reads = manifest.parts * (1 + -(-manifest.wire_bytes // self._config.blob_bytes))
        return reads * self._config.sync_timeout_s + self._config.in_use_timeout_s

    def ended(self, attempt: Attempt, *, failed: bool) -> None:
        """See weights_sync.carrier.Carrier."""
        if attempt.announced:
            return
        self._left.pop(attempt.publication.attempt, None)
        if NO_ROOM in attempt.error and self._left:
            oldest = self._left.pop(min(self._left))
            log.warning(
                "version %d is given up to make room for version %d, though not yet read by %s: %s",
                oldest.version, attempt.publication.version, ", ".join(sorted(one for one, _ in oldest.readers)),
                attempt.error,
            )  # fmt: skip

    def tidy(self, broker: Broker, readers: Iterable[Member]) -> None:
        """See weights_sync.carrier.Carrier. What is left of attempts that were given up goes as well."""
        readers = tuple(readers)
        for number, one in tuple(self._left.items()):  # a transfer that was left behind may add to it meanwhile
            if not any(map(one.wanted_by, readers)):
                self._left.pop(number, None)
        try:
            depot = open_depot(self._config, lambda: broker, self._folder)
            depot.sweep([one.folder for one in self._left.values()])
        except SyncFailed as error:
            log.warning("what nobody needs any more could not be removed: %s", error)
