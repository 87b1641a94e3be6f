"""The receiving end of a publication, inside the process that holds the engine's weights.

    receive(publication) -> [thread: source (groups or depot) -> every part, check names, verify digests]
                         -> on_settled(attempt, error) -> take(attempt) -> the engine loads the views

Nothing here touches live weights: whatever fails, the old version goes on serving. A second thread watches over the
attempt, because neither a blocked gloo operation nor a read from a dead file server can be interrupted: the attempt
settles at once when it says so, and the blocked thread is left to its own deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.depot import Connect
from weights_sync.errors import SyncFailed
from weights_sync.fetch import Fetch
from weights_sync.held import Held
from weights_sync.incoming import Incoming
from weights_sync.joined import Joined
from weights_sync.manifest import Manifest
from weights_sync.reception import Reception, Source
from weights_sync.staging import Staging

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A version that has arrived whole and verified."""

    manifest: Manifest
    staging: Staging


class Receiver:
    """Receives one publication at a time, in the background.

    Args:
        on_settled: called once per attempt with (attempt, error), error empty when staged; from a thread of ours.
        check: refuses a manifest that does not fit the engine's model by raising LayoutRefused.
        connect: opens a broker client; for ``weights_sync.transport = relay``.
        device: where staging lives; the engine's device with nccl, the CPU with all else.
    """

    def __init__(
        self,
        *,
        config: WeightsSyncConfig,
        member_id: str,
        on_settled: Callable[[int, str], None],
        check: Callable[[Manifest], None],
        connect: Connect | None = None,
        device: str = "cpu",
    ) -> None:
        self._member_id = member_id
        self._on_settled = on_settled
        self._check = check
        self._device = config.staging_device(device)
        self._lock = threading.Lock()
        self._staged: tuple[int, Staged] | None = None
        self._held = Held(keep=config.sparse)
        self._source: Source = (
            Joined(config, self._device) if config.transport == "collective" else Fetch(config, connect)
        )
        self._latest: Reception | None = None

    def receive(self, publication: Publication) -> None:
        """Starts receiving and returns at once; an earlier attempt still under way is superseded."""
        try:
            rank = publication.receivers.index(self._member_id) + 1
        except ValueError:
            raise SyncFailed(f"{self._member_id} is not among the receivers {publication.receivers}") from None
        attempt = self._latest = Reception(publication=publication, rank=rank)
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
        if attempt is not None and not attempt.ended.is_set():
            attempt.ended.set()
            self._source.leave(attempt)

    def _run(self, attempt: Reception) -> None:
        """[thread] Whatever is raised settles the attempt: the engine's owner decides."""
        try:
            with self._source.opened(attempt) as parts:
                threading.Thread(target=self._watch, args=(attempt,), name="verdict", daemon=True).start()
                incoming = Incoming(self._held, device=self._device)
                for part in range(attempt.publication.senders):
                    incoming.put(*parts(part, incoming.room))
                attempt.arrived()
                manifest, staging = incoming.whole()
                self._check(manifest)
                self._settle(attempt, staged=Staged(manifest=manifest, staging=staging))
        except Exception as error:  # whatever it is, the learner and the engine's owner have to hear of it
            self._settle(attempt, error=f"{type(error).__name__}: {error}")

    def _watch(self, attempt: Reception) -> None:
        """[thread] Settles an attempt that its source gives up; ends with the attempt."""
        if error := self._source.watch(attempt):
            self._settle(attempt, error=error)

    def _settle(self, attempt: Reception, *, staged: Staged | None = None, error: str = "") -> None:
        """Ends an attempt, once."""
        number = attempt.publication.attempt
        with self._lock:
            if attempt.ended.is_set():
                return
            attempt.ended.set()
            if staged is not None:
                self._staged = (number, staged)
        try:
            self._on_settled(number, self._source.settled(attempt, error))
        except Exception as lost:  # an engine that is not told would wait for ever
            log.exception("cannot hand attempt %d on", number)
            self._on_settled(number, self._source.settled(attempt, error or f"{type(lost).__name__}: {lost}"))
