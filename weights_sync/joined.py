"""The receiving end of process groups: joins the learner's store and, for each part, a group with its sender.

A store's client serves one call at a time, waiting calls included, so either thread of an attempt has its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from weights_sync.answers import answer
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import ABANDONED, STAGED, here_key, settled_key, verdict_key
from weights_sync.depot import check_transport
from weights_sync.errors import SyncFailed
from weights_sync.groups import Group, group_name, join_store, make_group, route_to
from weights_sync.manifest import Manifest
from weights_sync.reception import ReceivePart, Reception, Room
from weights_sync.transfer import receive

log = logging.getLogger(__name__)


class Joined:
    """weights_sync.reception.Source. Store and groups are used as long as the epoch lasts."""

    def __init__(self, config: WeightsSyncConfig, device: str) -> None:
        self._config, self._device = config, device
        self._store: tuple[str, TCPStore] | None = None
        self._epoch: tuple[str, int] | None = None
        self._groups: dict[int, Group] = {}  # by part, of this epoch
        self._own = threading.local()  # this thread's client of the store

    @contextmanager
    def opened(self, attempt: Reception) -> Iterator[ReceivePart]:
        """See weights_sync.reception.Source."""
        publication = attempt.publication
        known, self._store = self._store, None  # a client is kept if nothing waits in it after this attempt
        if known is None or known[0] != publication.store:
            check_transport(publication.store, "collective")
            known = (publication.store, join_store(publication.store, self._config.sync_timeout_s))
        store = self._own.store = known[1]

        def part_of(part: int, room: Room) -> tuple[Manifest, Tensor]:
            if part == 0 and store.check([verdict_key(publication.attempt, attempt.rank)]):
                # Read by a process that has just come under an old member id; gloo would wait for its group for ever.
                raise SyncFailed(f"attempt {publication.attempt} is over")
            store.set(here_key(publication.attempt, attempt.rank, part), "1")
            return receive(self._group_for(attempt, store, part), publication, part, room)

        yield part_of
        self._store = known

    def watch(self, attempt: Reception) -> str:
        """See weights_sync.reception.Source. Woken by the learner's verdict, by its death, or by ``leave``."""
        publication, timeout_s = attempt.publication, self._config.sync_timeout_s
        try:
            store = self._own.store = join_store(publication.store, timeout_s)
            key = verdict_key(publication.attempt, attempt.rank)
            while not attempt.ended.is_set():
                try:
                    store.wait([key], timedelta(seconds=timeout_s))
                except DistStoreError:
                    continue  # each bucket has its own deadline; the whole may take longer
                if store.get(key).decode() == ABANDONED:
                    return "abandoned by the learner"
                if not attempt.ended.wait(timeout_s):
                    return "sent, but not received within weights_sync.sync_timeout_s"
        except (SyncFailed, RuntimeError) as error:
            return f"the learner's store is gone: {error}"
        return ""

    def settled(self, attempt: Reception, error: str) -> str:
        """See weights_sync.reception.Source. After a failure groups and store are left to who still waits in them."""
        number, store = attempt.publication.attempt, getattr(self._own, "store", None)
        if error:
            self._epoch = self._store = None
        try:
            if store is not None:
                store.set(settled_key(number, attempt.rank), error or STAGED)
        except RuntimeError as lost:
            log.warning("cannot tell the learner how attempt %d ended: %s", number, lost)
        return answer(number, error) if error and store is None else error  # then the report has to say it

    def leave(self, attempt: Reception) -> None:
        """See weights_sync.reception.Source."""
        publication = attempt.publication
        try:
            join_store(publication.store, 1.0).set(verdict_key(publication.attempt, attempt.rank), ABANDONED)
        except (SyncFailed, RuntimeError) as error:
            log.debug("the learner's store is gone as well: %s", error)

    def _group_for(self, attempt: Reception, store: TCPStore, part: int) -> Group:
        publication = attempt.publication
        epoch = (publication.store, publication.epoch)
        if self._epoch != epoch:
            self._epoch, self._groups = epoch, {}
        if part not in self._groups:
            self._groups[part] = make_group(
                backend=self._config.backend,
                store=store,
                prefix=group_name(publication.epoch, part),
                rank=attempt.rank,
                size=len(publication.receivers) + 1,
                timeout_s=self._config.sync_timeout_s,
                device=self._device,
                interface=self._config.interface,
                address=route_to(publication.store),
            )
        return self._groups[part]
