"""The sending end on the learner ranks other than 0: fills slots and sends its part when rank 0 orders it.

rank 0: order -> [orders thread] -> [transfer thread: seal, "ready", receivers here, group, send] -> "sent" in the store
                                 or [transfer thread: seal, "ready", into the depot]
The orders thread also counts on in the store, by which rank 0 knows that this process is not stopped.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from broker.errors import SlipstreamError
from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import (
    FATAL,
    STAGED,
    beat_key,
    newest_order,
    order_key,
    ready_key,
    sent_key,
    verdict_key,
    wait_here,
)
from weights_sync.depot import Connect, open_depot
from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.groups import Group, group_name, join_store, make_group, route_to
from weights_sync.parcel import folder_of, put_part
from weights_sync.senders import beat_s
from weights_sync.shelf import Shelf
from weights_sync.slots import Slots
from weights_sync.staging import Declaration
from weights_sync.transfer import send
from weights_sync.updates import Payload

log = logging.getLogger(__name__)

_MARGIN_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What rank 0 wants sent. ``base_slot`` -1: the version whole."""

    publication: Publication
    slot: int
    base_slot: int
    base_version: int

    @classmethod
    def of(cls, publication: Publication, shelf: Shelf, *, base_version: int) -> Order:
        """The version that the shelf shows, as an update of its base unless that is -1."""
        assert shelf.shown is not None
        base_slot = shelf.base.slot if base_version >= 0 and shelf.base is not None else -1
        return cls(publication=publication, slot=shelf.shown.slot, base_slot=base_slot, base_version=base_version)

    def packed(self) -> str:
        """As JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, data: bytes) -> Order:
        """The other way."""
        fields: dict[str, Any] = json.loads(data)
        publication = fields.pop("publication")
        receivers = tuple(publication.pop("receivers"))
        return cls(publication=Publication(receivers=receivers, **publication), **fields)


@dataclass(kw_only=True)
class _Sending:
    order: Order
    over: bool = False
    moved_at: float = field(default_factory=time.monotonic)

    def moved(self) -> None:
        self.moved_at = time.monotonic()

    def waits(self) -> None:
        """For receivers, which come when the parts before have been sent."""
        self.moved_at = float("inf")


def send_part(
    *,
    config: WeightsSyncConfig,
    store: TCPStore,
    publication: Publication,
    part: int,
    payload: Payload,
    group: Group | None,
    device: str,
    address: str,
    moved: Callable[[], None],
    over: Callable[[], bool],
) -> Group:
    """The blocking part: waits for the receivers, forms the group unless there is one, sends. Raises SyncFailed.

    ``address``: this rank's own, as the receivers reach it.
    """
    ranks = range(1, len(publication.receivers) + 1)
    wait_here(store, publication.attempt, ranks, config.sync_timeout_s, part)
    if over():
        raise SyncFailed("abandoned")
    moved()
    group = group or make_group(
        backend=config.backend,
        store=store,
        prefix=group_name(publication.epoch, part),
        rank=0,
        size=len(publication.receivers) + 1,
        timeout_s=config.sync_timeout_s,
        device=device,
        interface=config.interface,
        address=address,
    )
    moved()
    send(group, publication, payload, bucket_bytes=config.bucket_bytes, moved=moved)
    return group


def said(error: Exception) -> str:
    """An error for those who only read of it: one that is not ours needs its type's name."""
    return str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"


def sizes_of(text: str) -> tuple[int, int]:
    """Its bytes on the wire, and whole."""
    _, wire, whole = text.split(" ")
    return int(wire), int(whole)


class PartSender:
    """Stands where the publisher stands on rank 0.

    Args:
        address: of rank 0's store.
        declaration: of this rank's elements.
        connect: opens a broker client; for ``weights_sync.transport = relay``.
    """

    def __init__(
        self,
        *,
        config: WeightsSyncConfig,
        address: str,
        declaration: Declaration,
        incarnation: int,
        connect: Connect | None = None,
        device: str = "cpu",
    ) -> None:
        self._connect = connect
        self._config, self._address, self._incarnation = config, address, incarnation
        self._part = declaration.part
        self._device = config.staging_device(device)
        self._slots = Slots(declaration, wire_dtype=config.wire_dtype, device=self._device, keep_fp32=config.keep_fp32)
        self._closed = threading.Event()
        self._group: tuple[int, Group] | None = None  # of an epoch
        self._sending: _Sending | None = None
        self._beats = 0
        self._tick_s = beat_s(config.sync_timeout_s)
        self._store = join_store(address, config.sync_timeout_s)
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)
        self._thread.start()

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]], slot: int) -> None:
        """Copies this rank's elements of a version into the slot that rank 0 has reserved. Raises LayoutRefused."""
        self._slots.fill(slot, version, tensors)

    def close(self) -> None:
        """Takes no more orders."""
        self._closed.set()
        self._thread.join(timeout=2 * self._tick_s + 1.0)

    def _run(self) -> None:
        """Waits for orders; woken by them, and each beat to see whether a transfer stands still."""
        number = 1
        while not self._closed.is_set():
            self._end_what_stands_still()
            try:
                self._beats += 1
                self._store.set(beat_key(self._part), str(self._beats))
                self._store.wait([order_key(number)], timedelta(seconds=self._tick_s))
                order = Order.unpacked(self._store.get(order_key(number)))
            except RuntimeError as error:  # DistStoreError: none yet, or this process has stood still while it came
                number = self._newest(number, error)
                continue
            number += 1
            if self._sending is not None:
                self._sending.over = True
            self._sending = sending = _Sending(order=order)
            threading.Thread(target=self._transfer, args=(sending,), name="transfer", daemon=True).start()

    def _newest(self, number: int, error: RuntimeError) -> int:
        """The order to wait for now. Rank 0 may have stood still: its store is joined anew until this rank closes."""
        try:
            return max(number, newest_order(self._store))
        except RuntimeError:
            log.warning("no orders from %s: %s", self._address, error)
        try:
            self._store = join_store(self._address, self._config.sync_timeout_s)
        except SyncFailed as gone:
            log.warning("%s", gone)
            self._closed.wait(self._tick_s)
        return number

    def _end_what_stands_still(self) -> None:
        sending = self._sending
        if sending is not None and time.monotonic() - sending.moved_at > self._config.sync_timeout_s + _MARGIN_S:
            self._tell(self._store, sending, "the transfer stands still (deadline: weights_sync.sync_timeout_s)")

    def _transfer(self, sending: _Sending) -> None:
        order = sending.order
        publication = order.publication
        store = None
        try:
            store = join_store(self._address, self._config.sync_timeout_s)
            manifest = self._slots.manifest(
                order.slot, publication.version, self._incarnation, wait_s=self._config.sync_timeout_s
            )
            payload = self._slots.payload(
                manifest, order.slot, base_slot=order.base_slot, base_version=order.base_version
            )
            store.set(ready_key(publication.attempt, self._part), "1")
            if self._config.transport == "collective":
                sending.waits()
                self._send(store, sending, payload)
            else:
                self._deposit(sending, payload)
            self._tell(store, sending, f"{STAGED} {payload.data.numel()} {manifest.payload_bytes}")
        except LayoutRefused as error:
            self._tell(store, sending, f"{FATAL}{error}")
        except Exception as error:  # whatever it is, rank 0 has to hear of it
            self._tell(store, sending, said(error))

    def _deposit(self, sending: _Sending, payload: Payload) -> None:
        publication = sending.order.publication
        sending.moved()
        depot = open_depot(self._config, self._connect, folder_of(publication, self._config.transport))
        try:
            put_part(depot, self._config, publication, payload, moved=sending.moved, over=lambda: sending.over)
        finally:
            depot.close()

    def _send(self, store: TCPStore, sending: _Sending, payload: Payload) -> None:
        """As ``send_part``, with patience for the parts before ours, each of which keeps to its own deadlines."""
        publication = sending.order.publication
        known = self._group[1] if self._group is not None and self._group[0] == publication.epoch else None
        while True:
            try:
                group = send_part(
                    config=self._config, store=store, publication=publication, part=self._part, payload=payload,
                    group=known, device=self._device, address=route_to(self._address), moved=sending.moved,
                    over=lambda: sending.over,
                )  # fmt: skip
                if not sending.over:  # else a later attempt, of another epoch, may have formed its own
                    self._group = (publication.epoch, group)
                return
            except SyncFailed:
                waiting = sending.moved_at == float("inf")
                if not waiting or sending.over or store.check([verdict_key(publication.attempt, 1)]):
                    raise

    def _tell(self, store: TCPStore | None, sending: _Sending, text: str) -> None:
        """How the part ended, once."""
        if sending.over:
            return
        sending.over = True
        sending.moved_at = float("inf")
        if not text.startswith(STAGED):
            self._group = None
            log.warning("version %d, part %d: %s", sending.order.publication.version, self._part, text)
        try:  # the orders' own client is busy for a second at a time, which is better than no answer
            (store or self._store).set(sent_key(sending.order.publication.attempt, self._part), text)
        except RuntimeError as lost:
            log.warning("cannot tell rank 0: %s", lost)
