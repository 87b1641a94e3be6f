"""The sending end: from ``offer`` on the learner's thread to a version that every live generator reports in use.

    offer(v) -> a slot -> [sender thread: seal, choose receivers, announce] -> [transfer thread: carrier.send]
                       -> receivers answer -> members report v (broker) -> confirmed
    with several learner ranks this is rank 0, which orders the others (part_sender.py) to send their parts

How the bytes travel is the carrier's: process groups, or a depot, where a version is announced when it is there.

Three threads of ours share one condition. The member watch keeps ``_members`` fresh; the sender decides and waits;
a transfer thread per attempt does what blocks, because only leaving it behind ends it early. The attempt after one
that failed in any way goes to whoever is alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from torch import Tensor

from broker.contract import Broker
from broker.errors import NoOpenRun
from broker.messages import Member, Publication
from weights_sync.carrier import Carrier
from weights_sync.collective import Collective
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import ABANDONED, SENT, STAGED, Attempt, Control
from weights_sync.deposit import Deposit
from weights_sync.errors import LayoutRefused, NoReceiver, SyncFailed
from weights_sync.groups import host_store
from weights_sync.manifest import Manifest
from weights_sync.members import GONE, LATE, SILENT, STRIKES, Blame, MemberWatch, Solitude, holds, key, lacks, live
from weights_sync.part_sender import Order, said, sizes_of
from weights_sync.senders import Senders
from weights_sync.shelf import Shelf
from weights_sync.slots import Slots
from weights_sync.staging import Declaration
from weights_sync.stats import PublishStats
from weights_sync.updates import Payload

log = logging.getLogger(__name__)

_SLICE_S = 0.1  # between looks at the store, which wakes nobody
_ANSWER_S = 2.0  # for receivers to confirm that they left an abandoned attempt
_BACKOFF_S = (0.0, 0.1, 0.5, 2.0)


class Publisher:
    """Sends policy versions to the generators, beside the learner's steps.

    Args:
        connect: opens a broker client; called once per thread that needs one.
        declaration: what the model has to send (weights_sync.staging.declare).
        incarnation: of this learner, as ``Broker.open_run`` returned it.
        device: of the model; the staging buffers are there with nccl, and else on the CPU.

    A failure of the publisher itself is raised by the next ``offer``, ``flush`` or ``check``.
    """

    def __init__(
        self,
        *,
        config: WeightsSyncConfig,
        connect: Callable[[], Broker],
        declaration: Declaration,
        incarnation: int,
        device: str = "cpu",
    ) -> None:
        self._config, self._connect, self._incarnation = config, connect, incarnation
        device = config.staging_device(device)
        self._parts = declaration.parts
        self._slots = Slots(declaration, wire_dtype=config.wire_dtype, device=device, keep_fp32=config.keep_fp32)
        self._shelf = Shelf(sparse=config.sparse)
        self._store, self.address = host_store(config.host, config.port, config.sync_timeout_s)
        self._control = Control(self._store, parts=self._parts)
        self._senders = Senders(self._control, parts=self._parts, timeout_s=config.sync_timeout_s)
        self._changed = threading.Condition()
        broker = connect()
        state = broker.state()
        broker.close()
        self._carrier: Carrier = (
            Collective(config, self.address, self._control, device=device)
            if config.transport == "collective"
            else Deposit(
                config, connect, declaration, run=state.rules.run if state.rules else "", incarnation=incarnation
            )
        )
        self._members = state.members
        self._blame = Blame()
        self._failure: BaseException | None = None
        self._closed = False
        self._offered = -1
        self._whole_next = False  # an update has failed: the version is sent whole from then on
        known = state.publication
        self._numbers = (known.attempt, known.epoch) if known else (0, 0)  # go on counting after a restart
        self._failed_in_a_row = 0
        # Who is dead and not yet given up is silent; by this time after it, it is given up.
        self._rest_s = state.rules.member_timeout_s if state.rules else config.sync_timeout_s
        self._progress = time.monotonic()
        self._solitude = Solitude(config.no_generator_timeout_s)
        self.stats = PublishStats()
        log.info("weights are offered at %s", self._carrier.address)
        self._watch = MemberWatch(connect, on_members=self._members_are, on_error=self._fail)
        self._sender = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._sender.start()

    # -- the learner's thread ----------------------------------------------------------------------------------
    def reserve(self) -> int:
        """The slot that every learner rank fills with the next version. Raises what ended the publisher."""
        self.check()
        return self._shelf.reserve()

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]], slot: int | None = None) -> None:
        """Copies what this rank declared of a version into staging and returns; sending goes on beside.

        A version that still waits is replaced. ``slot``: as reserved, where other ranks fill theirs. Raises
        LayoutRefused, or what ended the publisher.
        """
        self.check()
        slot = self._shelf.reserve() if slot is None else slot
        self._slots.fill(slot, version, tensors)
        self._shelf.offered(slot, version)
        with self._changed:
            self._offered = version
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Waits until every live generator uses the newest offered version. Raises SyncFailed at the timeout."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._failure is not None or not self._behind(), timeout_s)
            behind = self._behind()
        self.check()
        if not done:
            raise SyncFailed(
                f"version {self._offered} is not in use after {timeout_s:g} s at {', '.join(behind) or 'anyone'} "
                f"(weights_sync.sync_timeout_s = {self._config.sync_timeout_s:g}); {self._blame.text()}"
            )

    def check(self) -> None:
        """For who waits for something else. Raises what ended the publisher."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stops sending. An attempt under way is abandoned."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sender.join(timeout=_ANSWER_S + 1.0)
        self._watch.close()

    def _behind(self) -> list[str]:
        """Live generators that do not use the newest offered version; caller holds the lock."""
        wanted, incarnation = self._offered, self._incarnation
        candidates = self._blame.candidates(self._members) if wanted >= 0 else ()
        booked = self.stats.version == wanted
        return [m.member_id for m in candidates if not (booked and holds(m, version=wanted, incarnation=incarnation))]

    # -- the watch's thread ------------------------------------------------------------------------------------
    def _members_are(self, members: tuple[Member, ...]) -> None:
        with self._changed:
            self._members = members
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None and not self._closed:
                self._failure = error
            self._changed.notify_all()

    # -- the sender's thread -----------------------------------------------------------------------------------
    def _run(self) -> None:
        """Waits for an offer, a newcomer, or close; then tries to send."""
        try:
            broker = self._connect()
            while (members := self._next_receivers()) is not None:
                self._try(broker, members)
            self._carrier.tidy(broker, ())
            broker.close()
        except BaseException as error:
            log.error("the publisher ends: %s", error)
            if isinstance(error, NoReceiver | LayoutRefused):
                self._carrier.tidy(broker, ())
            self._fail(error)

    def _next_receivers(self) -> tuple[Member, ...] | None:
        """The receivers of the next attempt, or None when closed. Raises NoReceiver."""
        not_before = time.monotonic() + _BACKOFF_S[min(self._failed_in_a_row, len(_BACKOFF_S) - 1)]
        while True:
            if self._shelf.promote():
                self._whole_next = False
            current = self._shelf.shown
            with self._changed:
                if self._closed or self._failure is not None:
                    return None
                if current is None:
                    self._progress = time.monotonic()
                    self._changed.wait()
                    continue
                pending = self._pending(current.version)
                now = time.monotonic()
                if pending and now >= not_before:
                    return pending
                self._solitude.end(self._blame, current.version, since=self._progress)
                self._solitude.tell(self._blame, self._members, current.version, first=self.stats.version < 0)
                if self._shelf.waiting is None:
                    self._changed.wait(max(0.01, not_before - now) if pending else _SLICE_S * 10)

    def _pending(self, version: int) -> tuple[Member, ...]:
        """Generators to send ``version`` to, those with the base of an update first; notes when all have it.

        Whoever was left out or was silent a moment ago is passed over.
        """
        self._blame.keep(live(self._members))
        awake = self._blame.awake(self._members, time.monotonic())
        pending = tuple(m for m in awake if not holds(m, version=version, incarnation=self._incarnation))
        if awake and not pending:
            self._progress = time.monotonic()
            self._blame.settle()
            self._shelf.confirm()
        return tuple(m for m in pending if self._has_base(m)) or pending

    def _has_base(self, member: Member) -> bool:
        base = self._shelf.base
        return base is not None and holds(member, version=base.version, incarnation=self._incarnation)

    def _try(self, broker: Broker, members: tuple[Member, ...]) -> None:
        """One attempt: announce, transfer, wait for the reports."""
        members = tuple(m for m in members if self._reachable(m))
        if not members:
            return
        self._carrier.tidy(broker, self._blame.candidates(self._members))
        update = all(map(self._has_base, members)) and not self._whole_next
        payload = self._slots.shown(self._shelf, self._incarnation, update=update)
        began = time.monotonic()
        attempt = self._begin(members, payload.manifest)
        if self._carrier.fetched:
            failures = self._send(attempt, payload) or self._announce(broker, attempt)
        else:
            failures = self._announce(broker, attempt) or self._send(attempt, payload)
        failures = failures or self._wait_in_use(attempt, self._carrier.patience_s(payload.manifest))
        self._whole_next |= bool(failures) and payload.manifest.base >= 0
        self._book(attempt, payload, failures, time.monotonic() - began)
        self._carrier.tidy(broker, self._blame.candidates(self._members))

    def _reachable(self, member: Member) -> bool:
        if error := self._carrier.excuse(member):
            log.error("generator %s is left out: %s", member.member_id, error)
            self._blame.strike(member, error, times=STRIKES)
        return not error

    def _begin(self, members: tuple[Member, ...], manifest: Manifest) -> Attempt:
        """Numbers an attempt and has the other learner ranks send their parts."""
        new_epoch = self._carrier.needs_epoch(tuple(map(key, members)))
        self._numbers = number, epoch = self._numbers[0] + 1, self._numbers[1] + new_epoch
        publication = Publication(
            version=manifest.version,
            incarnation=self._incarnation,
            attempt=number,
            epoch=epoch,
            store=self._carrier.address,
            receivers=tuple(m.member_id for m in members),
            senders=self._parts,
        )
        self._control.sweep(attempt=number - 1, epoch=epoch)
        self._control.order(Order.of(publication, self._shelf, base_version=manifest.base).packed())
        return Attempt(publication=publication, members=members)

    def _announce(self, broker: Broker, attempt: Attempt) -> dict[int, str]:
        """Returns the failure, if it is one that passes: a broker without its memory is told of the run by the feed."""
        try:
            broker.publish(attempt.publication)
        except NoOpenRun as error:
            return {0: str(error)}
        attempt.announced = True
        return {}

    def _send(self, attempt: Attempt, payload: Payload) -> dict[int, str]:
        """Sends and waits for the end of it, whatever it is."""
        transfer = threading.Thread(target=self._transfer, args=(attempt, payload), name="transfer", daemon=True)
        transfer.start()
        failures = self._wait_sent(attempt)
        failed_at, attempt.over = time.monotonic(), bool(failures)
        if failures and attempt.announced and 0 not in failures:  # before the verdict, which frees those who wait
            failures = dict.fromkeys(self._senders.missing(attempt, since=failed_at), LATE) | failures
        self._carrier.decide(attempt, ABANDONED if failures else SENT)
        if self._closed:
            transfer.join(timeout=_ANSWER_S)
        if failures and not self._carrier.fetched:
            self._blame_silent(attempt, failures, failed_at)
        return failures

    def _transfer(self, attempt: Attempt, payload: Payload) -> None:
        """[transfer thread] The blocking part."""
        try:
            self._carrier.send(attempt, payload)
            attempt.sent = True
        except LayoutRefused as error:
            attempt.refused = str(error)
        except Exception as error:  # whatever it is: the publisher decides
            attempt.error = f"rank 0, version {attempt.publication.version}: {said(error)}"
        with self._changed:
            self._changed.notify_all()

    def _wait_sent(self, attempt: Attempt) -> dict[int, str]:
        """Waits for the end of the transfer; woken by it, by a receiver's end, or by close. Failures by rank."""
        senders = self._senders
        senders.begin()
        with self._changed:
            while True:
                senders.look(attempt)
                if attempt.sent and senders.all_sent:
                    attempt.others = tuple(senders.said.values())
                    return {}
                if refused := attempt.refused or senders.refused():
                    raise LayoutRefused(refused)
                if attempt.announced and (failures := self._failures(attempt)):
                    return failures
                attempt.error = attempt.error or senders.lost()
                if attempt.error or self._closed or self._failure is not None:
                    return {0: attempt.error or "the publisher is closing"}
                # Each operation has its own deadline, but gloo does not keep to it while it forms a group.
                if not attempt.sent and time.monotonic() - attempt.moved_at > self._config.sync_timeout_s + _ANSWER_S:
                    return {0: "the transfer stands still (deadline: weights_sync.sync_timeout_s)"}
                self._changed.wait(_SLICE_S)

    def _wait_in_use(self, attempt: Attempt, patience_s: float) -> dict[int, str]:
        """Waits until every receiver reports the version, has failed, or the time is over.

        Where each fetches for itself, the slowest does not hold up the others' next version: it goes on by itself.
        """
        began, version, fetched = time.monotonic(), attempt.publication.version, self._carrier.fetched
        late = f"does not report the version (deadline: {self._config.in_use_setting})"
        with self._changed:
            while True:
                ranks = lacks(attempt.ranks(), self._members, version=version, incarnation=self._incarnation)
                lacking = dict.fromkeys(ranks, late)
                failures = self._failures(attempt)
                if lacking.keys() <= failures.keys():
                    return {rank: failures[rank] for rank in lacking}
                others = fetched and len(lacking) < len(attempt.members) and self._shelf.waiting is not None
                wait_s = min(patience_s, self._config.in_use_timeout_s) if others else patience_s
                if time.monotonic() > began + wait_s or self._closed or self._failure is not None:
                    until = max(began + patience_s, time.monotonic() + self._rest_s)
                    for rank, member in attempt.ranks() if fetched else ():
                        if rank in lacking:
                            self._blame.rest(member, until, fetching=version)
                    return lacking | failures
                self._changed.wait(_SLICE_S)

    def _failures(self, attempt: Attempt) -> dict[int, str]:
        """Receivers that have settled with an error or are gone, by rank; caller holds the lock."""
        answers = self._carrier.answers(attempt, self._members)
        failures = {rank: answer for rank, answer in answers.items() if answer != STAGED}
        alive = {key(m) for m in live(self._members)}
        gone = {rank: GONE for rank, member in attempt.ranks() if key(member) not in alive}
        return gone | failures

    def _blame_silent(self, attempt: Attempt, failures: dict[int, str], failed_at: float) -> None:
        """After a verdict of abandoned every living receiver answers at once; one that does not is stuck.

        So is a learner rank that gives no sign, and then those are not to blame to whom it did not send.
        """
        deadline = time.monotonic() + min(_ANSWER_S, self._config.sync_timeout_s)
        ask = 0 not in failures and GONE not in failures.values()
        with self._changed:
            while True:
                self._senders.look(attempt)
                alive = {key(m) for m in live(self._members)}
                answered = self._carrier.answers(attempt, self._members)
                silent = [rank for rank, member in attempt.ranks() if key(member) in alive and rank not in answered]
                waits = silent or (ask and self._senders.unheard(failed_at))
                if not waits or time.monotonic() > deadline or self._closed:
                    break
                self._changed.wait(_SLICE_S)
        for rank, member in attempt.ranks():
            if rank in silent:
                self._blame.rest(member, time.monotonic() + self._rest_s)
        failures.update(dict.fromkeys(silent, SILENT))
        if ask and (fault := self._senders.fault(attempt, since=failed_at)):
            failures[0] = fault

    def _book(self, attempt: Attempt, payload: Payload, failures: dict[int, str], seconds: float) -> None:
        """Counts the attempt, and blames who broke it."""
        publication = attempt.publication
        self._blame.book(publication, attempt.members, failures)
        with self._changed:
            if attempt.sent and 0 not in failures and len(failures) < len(attempt.members):
                self._progress = time.monotonic()
            attempt.over = True
            self._carrier.ended(attempt, failed=bool(failures))
            self._failed_in_a_row = self._failed_in_a_row + 1 if failures else 0
            self._pending(publication.version)  # before a newer version takes this one's place on the shelf
            if failures:
                self.stats = self.stats.failed(publication)
            else:
                sizes = [(payload.manifest.wire_bytes, payload.manifest.payload_bytes), *map(sizes_of, attempt.others)]
                self.stats = self.stats.taken(publication, sizes, seconds)
            self._changed.notify_all()
