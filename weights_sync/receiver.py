"""The receiving end of a publication, inside the process that holds the engine's weights.

    receive(publication) -> [thread: join store, form or reuse group, receive, check names, verify digests]
                         -> on_settled(attempt, error) -> take(attempt) -> the engine loads the views

Nothing here touches live weights: whatever fails, the old version goes on serving. A second thread waits for the
learner's verdict on the attempt, because a blocked gloo operation cannot be interrupted: when the learner abandons an
attempt, the attempt settles at once and the blocked thread is left to its own deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import ABANDONED, STAGED, here_key, settled_key, verdict_key
from weights_sync.errors import SyncFailed
from weights_sync.groups import Group, group_name, join_store, make_group, route_to
from weights_sync.held import Held
from weights_sync.incoming import Incoming
from weights_sync.manifest import Manifest
from weights_sync.staging import Staging
from weights_sync.transfer import receive

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A version that has arrived whole and verified."""

    manifest: Manifest
    staging: Staging


@dataclass(kw_only=True)
class _Attempt:
    publication: Publication
    rank: int
    ended: threading.Event = field(default_factory=threading.Event)


class Receiver:
    """Receives one publication at a time, in the background.

    Args:
        on_settled: called once per attempt with (attempt, error), error empty when staged; from a thread of ours.
        check: refuses a manifest that does not fit the engine's model by raising LayoutRefused.
        device: where staging lives; the engine's device with nccl, the CPU with gloo.
    """

    def __init__(
        self,
        *,
        config: WeightsSyncConfig,
        member_id: str,
        on_settled: Callable[[int, str], None],
        check: Callable[[Manifest], None],
        device: str = "cpu",
    ) -> None:
        self._config = config
        self._member_id = member_id
        self._on_settled = on_settled
        self._check = check
        self._device = device if config.backend == "nccl" else "cpu"
        self._lock = threading.Lock()
        self._staged: tuple[int, Staged] | None = None
        self._held = Held(keep=config.sparse)
        self._store: tuple[str, TCPStore] | None = None
        self._epoch: tuple[str, int] | None = None
        self._groups: dict[int, Group] = {}  # by part, of this epoch
        self._latest: _Attempt | None = None

    def receive(self, publication: Publication) -> None:
        """Starts receiving and returns at once; an earlier attempt still under way is superseded."""
        try:
            rank = publication.receivers.index(self._member_id) + 1
        except ValueError:
            raise SyncFailed(f"{self._member_id} is not among the receivers {publication.receivers}") from None
        attempt = self._latest = _Attempt(publication=publication, rank=rank)
        name = f"receive-{publication.attempt}"
        threading.Thread(target=self._run, args=(attempt,), name=name, daemon=True).start()

    def take(self, attempt: int) -> Staged:
        """The staged version of this attempt, once. Raises SyncFailed if there is none."""
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is None or staged[0] != attempt:
            raise SyncFailed(f"attempt {attempt} is not staged")
        self._held.add(staged[1].manifest, staged[1].staging)
        return staged[1]

    def close(self) -> None:
        """Leaves an attempt under way, so that none of our threads is waiting for the learner at the process's end."""
        attempt = self._latest
        if attempt is None or attempt.ended.is_set():
            return
        attempt.ended.set()
        try:
            own = verdict_key(attempt.publication.attempt, attempt.rank)
            join_store(attempt.publication.store, 1.0).set(own, ABANDONED)
        except (SyncFailed, RuntimeError) as error:
            log.debug("the learner's store is gone as well: %s", error)

    def _run(self, attempt: _Attempt) -> None:
        """[thread] Anything that torch or the resolver raises settles the attempt: the engine's owner decides."""
        store = None
        try:
            store = self._joined(attempt.publication.store)
            threading.Thread(target=self._watch, args=(attempt,), name="verdict", daemon=True).start()
            staged = self._transfer(attempt, store)
        except (SyncFailed, RuntimeError, OSError, ValueError) as error:
            self._settle(attempt, store, error=f"{type(error).__name__}: {error}")
        else:
            self._settle(attempt, store, staged=staged)

    def _transfer(self, attempt: _Attempt, store: TCPStore) -> Staged:
        publication = attempt.publication
        if store.check([verdict_key(publication.attempt, attempt.rank)]):
            # Read by a process that has just come under an old member id; gloo would wait for its group without end.
            raise SyncFailed(f"attempt {publication.attempt} is over")
        incoming = Incoming(self._held, device=self._device)
        for part in range(publication.senders):
            store.set(here_key(publication.attempt, attempt.rank, part), "1")
            incoming.put(*receive(self._group_for(attempt, store, part), publication, part, incoming.room))
        manifest, staging = incoming.whole()
        self._check(manifest)
        return Staged(manifest=manifest, staging=staging)

    def _joined(self, address: str) -> TCPStore:
        if self._store is None or self._store[0] != address:
            self._store = (address, join_store(address, self._config.sync_timeout_s))
        return self._store[1]

    def _group_for(self, attempt: _Attempt, store: TCPStore, part: int) -> Group:
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

    def _watch(self, attempt: _Attempt) -> None:
        """[thread] Waits for the learner's verdict; woken by it, by the learner's death, or by ``close``."""
        publication = attempt.publication
        store = None
        try:
            store = join_store(publication.store, self._config.sync_timeout_s)
            key = verdict_key(publication.attempt, attempt.rank)
            while not attempt.ended.is_set():
                try:
                    store.wait([key], timedelta(seconds=self._config.sync_timeout_s))
                except DistStoreError:
                    continue  # each bucket has its own deadline; the whole may take longer
                if store.get(key).decode() == ABANDONED:
                    self._settle(attempt, store, error="abandoned by the learner")
                elif not attempt.ended.wait(self._config.sync_timeout_s):
                    self._settle(attempt, store, error="sent, but not received within weights_sync.sync_timeout_s")
                return
        except (SyncFailed, RuntimeError) as error:
            self._settle(attempt, store, error=f"the learner's store is gone: {error}")

    def _settle(
        self, attempt: _Attempt, store: TCPStore | None, *, staged: Staged | None = None, error: str = ""
    ) -> None:
        """Ends an attempt, once. After a failure group and store are left to whatever thread still waits in them."""
        number = attempt.publication.attempt
        with self._lock:
            if attempt.ended.is_set():
                return
            attempt.ended.set()
            if staged is not None:
                self._staged = (number, staged)
            else:
                self._epoch = self._store = None
        try:
            if store is not None:
                store.set(settled_key(number, attempt.rank), error or STAGED)
        except RuntimeError as lost:
            log.warning("cannot tell the learner how attempt %d ended: %s", number, lost)
        self._on_settled(number, error)
