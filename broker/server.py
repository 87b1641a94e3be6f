"""The ZeroMQ broker: one thread, one ledger, answers deferred instead of polled for.

    request -> decode -> answer(ledger) -> value        a reply, sent at the end of the turn (and after the store)
                                        -> PENDING      a waiter: asked again after every change of the ledger,
                                                        and for the last time at its deadline
The loop waits for a request, the earliest deadline of a waiter, the next lease or member to expire, or ``stop``.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from broker.address import bracketed, reachable_host, resolve
from broker.calls import PENDING, Bodies, Call, EvalResults, GetBlob, LeasePrompts, TakeBatch, answer, waits_alike
from broker.codec import decode
from broker.config import BrokerConfig
from broker.errors import BrokerError, NoOpenRun, Refused, RunFinished
from broker.handshake import Door
from broker.heads import LeaseHead
from broker.keys import server_keys
from broker.ledger import Ledger
from broker.store import Store
from broker.wire import (
    HEAD_BYTES,
    NO_REQUEST,
    PROBE,
    TEXT_CHARACTERS,
    UNKNOWN,
    WAITING,
    RequestHead,
    bare_reply,
    error_reply,
    lent,
    read_call,
    receive_parts,
    send_parts,
    value_reply,
)

log = logging.getLogger(__name__)

CLIENTS_REMEMBERED = 16384  # last answers kept for a request sent again; the longest silent client is forgotten first
LONGEST_PAUSE_S = 3600.0  # ZeroMQ counts milliseconds in 32 bits
LONGEST_WAIT_S = 3600.0  # of a call; who still wants to wait asks again
SWEEP_AT = 1024
REQUESTS_PER_TURN = 64  # taken in before waiters are looked at, so that a busy sender cannot hold up the rest


@dataclass(slots=True)
class Session:
    """What one client asked last: a waiting call until ``deadline``, or the answer it got."""

    request_id: int
    call: Call[Any] | None = None
    bodies: Bodies = ()
    deadline: float = 0.0
    reply: list[bytes] | None = None
    alike: object = None  # while it waits: the key of those who wait alike


class BrokerServer:
    """Binds in the constructor and keeps the port; ``run`` serves until ``stop``.

    ``store`` makes the ledger durable: it is loaded here, and no answer leaves before its change is stored.
    """

    def __init__(
        self, config: BrokerConfig, *, clock: Callable[[], float] = time.monotonic, store: Store | None = None
    ) -> None:
        keys = server_keys(config)
        self.ledger = Ledger()
        self._store = store
        self._max_bytes = config.max_frame_bytes
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._waiting: dict[object, OrderedDict[bytes, Session]] = {}  # alike ones together, first come first served
        self._deadlines: list[tuple[float, int, bytes]] = []  # with the request's number; may hold what has ended
        self._outbox: list[tuple[bytes, list[bytes], tuple[LeaseHead, ...]]] = []
        self._sweep_at = SWEEP_AT
        self._seen_changes = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_address = f"inproc://broker-stop-{uuid.uuid4().hex}"
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind(self._wake_address)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to who is gone fails instead of vanishing
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its name along
        self._router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        # Twice the limit still gets an answer that says why; beyond, ZeroMQ closes the connection unread.
        self._router.setsockopt(zmq.MAXMSGSIZE, 2 * config.max_frame_bytes)
        self._door = Door(self._router, keys, self.ledger)
        self.url = self._bind(config)
        if store is not None and store.load(self.ledger, clock()):
            log.info("the ledger is back: version %d, %s", self.ledger.version, self.ledger.items.counts())

    def run(self, stop: threading.Event) -> None:
        """Serves until ``stop`` is set, then closes."""
        threading.Thread(target=self._wake_on, args=(stop,), name="broker-stop", daemon=True).start()
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        for door in self._door.sockets:
            poller.register(door, zmq.POLLIN)
        try:
            while self._wake not in (ready := dict(poller.poll(self._pause_ms()))):
                if any(door in ready for door in self._door.sockets):
                    self._door.look()
                self._take_requests()
                self.ledger.expire(self._clock())
                self._ask_again()
                self._flush()
        finally:
            self.close()

    def close(self) -> None:
        """Frees the port and the store."""
        if not self._context.closed:
            self._door.close()
            self._router.close()
            self._wake.close(linger=0)
            self._context.term()
        if self._store is not None:
            self._store.close()

    # -- requests ----------------------------------------------------------------------------------------------
    def _take_requests(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                parts, problem = receive_parts(self._router, most_bytes=2 * self._max_bytes)
            except zmq.Again:
                return
            self._take(parts[0].bytes, self._kept(parts[1:]), problem)

    def _kept(self, frames: list[zmq.Frame]) -> list[bytes]:
        """What is left where it arrived, if it can be sent on from there and is large enough to be worth it."""
        return [one.bytes for one in frames] if self._store is not None else lent(frames)

    def _take(self, sender: bytes, frames: list[bytes], problem: str) -> None:
        head: RequestHead | None = None
        try:
            head = decode(frames[0] if frames else b"", RequestHead, max_bytes=HEAD_BYTES)
            session = self._sessions.get(sender)
            if session is not None and head.request_id <= session.request_id:
                self._repeat(sender, session, head)
                return
            if head.call == PROBE:
                self._post(sender, bare_reply(head.request_id, UNKNOWN))
                return
            if problem:
                raise Refused(problem)
            call, bodies = read_call(head, frames[1:], max_bytes=self._max_bytes)
        except Refused as error:
            self.ledger.events["malformed"] += 1
            log.warning("refused a request: %s", str(error)[:TEXT_CHARACTERS])
            self._post(sender, error_reply(head.request_id if head else NO_REQUEST, error))
            return
        session = Session(head.request_id, call, bodies, self._clock() + min(head.wait_s, LONGEST_WAIT_S))
        self._remember(sender, session)
        if not self._try(sender, session):
            session.alike = waits_alike(call)
            self._waiting.setdefault(session.alike, OrderedDict())[sender] = session
            self._end_at(session.deadline, session.request_id, sender)

    def _repeat(self, sender: bytes, session: Session, head: RequestHead) -> None:
        """The client did not see an answer in time: say it again, or that the call still waits."""
        if head.request_id == session.request_id:
            self._post(sender, session.reply or bare_reply(session.request_id, WAITING))

    def _try(self, sender: bytes, session: Session) -> bool:
        """Answers the call if it can be answered now, and says whether it was."""
        call, now = session.call, self._clock()
        assert call is not None
        try:
            found = answer(self.ledger, call, session.bodies, now=now, last=now >= session.deadline)
            if found is PENDING:
                return False
            value, bodies = found
            frames = value_reply(session.request_id, call, value, bodies)
        except (Refused, NoOpenRun, RunFinished) as error:
            self._reply(sender, session, error_reply(session.request_id, error))
            return True
        self._reply(sender, session, frames, value if isinstance(call, LeasePrompts) else ())
        return True

    def _reply(self, sender: bytes, session: Session, frames: list[bytes], leases: tuple[LeaseHead, ...] = ()) -> None:
        """Remembers the answer for a request sent again, unless that gets the same anyway and may be large."""
        call = session.call
        self._stop_waiting(sender, session)
        if isinstance(call, TakeBatch | EvalResults | GetBlob):
            del self._sessions[sender]
        else:
            session.call, session.bodies, session.reply = None, (), frames
        self._post(sender, frames, leases)

    def _post(self, sender: bytes, frames: list[bytes], leases: tuple[LeaseHead, ...] = ()) -> None:
        self._outbox.append((sender, frames, leases))

    def _flush(self) -> None:
        """Stores what this turn has changed, then sends its answers."""
        if self._store is not None:
            self._store.commit(self.ledger)
        outbox, self._outbox = self._outbox, []
        for sender, frames, leases in outbox:
            if self._send(sender, frames):
                continue
            self._sessions.pop(sender, None)
            for lease in leases:  # nobody got them: better now than after broker.lease_timeout_s
                self.ledger.release(lease_id=lease.lease_id, error="")

    def _send(self, sender: bytes, frames: list[bytes]) -> bool:
        try:
            send_parts(self._router, [sender, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _remember(self, sender: bytes, session: Session) -> None:
        self._forget(sender)
        self._sessions[sender] = session
        while len(self._sessions) > CLIENTS_REMEMBERED:
            self._forget(next(iter(self._sessions)))

    def _forget(self, sender: bytes) -> None:
        session = self._sessions.pop(sender, None)
        if session is not None:
            self._stop_waiting(sender, session)

    # -- waiters -----------------------------------------------------------------------------------------------
    def _end_at(self, deadline: float, request_id: int, sender: bytes) -> None:
        """Notes a waiter's deadline; those of calls that have ended are swept out when they are the most."""
        heapq.heappush(self._deadlines, (deadline, request_id, sender))
        if len(self._deadlines) > self._sweep_at:
            waiting = {(one.request_id, name) for bucket in self._waiting.values() for name, one in bucket.items()}
            self._deadlines = [one for one in self._deadlines if one[1:] in waiting]
            heapq.heapify(self._deadlines)
            self._sweep_at = SWEEP_AT + 2 * len(self._deadlines)

    def _stop_waiting(self, sender: bytes, session: Session) -> None:
        if session.alike is None:
            return
        bucket = self._waiting[session.alike]
        del bucket[sender]
        if not bucket:
            del self._waiting[session.alike]
        session.alike = None

    def _ask_again(self) -> None:
        """Looks at the waiters whose time is over, and at all kinds of them as long as the ledger changes."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, sender = heapq.heappop(self._deadlines)
            session = self._sessions.get(sender)
            if session is not None and session.request_id == request_id and session.call is not None:
                self._try(sender, session)
        while self._seen_changes != self.ledger.changes:
            self._seen_changes = self.ledger.changes
            for bucket in list(self._waiting.values()):
                while bucket and self._try(*next(iter(bucket.items()))):
                    pass

    def _pause_ms(self) -> int | None:
        if self._seen_changes != self.ledger.changes:
            return 0
        ends = [self._deadlines[0][0]] if self._deadlines else []
        expiry = self.ledger.next_deadline()
        ends += [] if expiry is None else [expiry]
        return None if not ends else int(1000 * min(LONGEST_PAUSE_S, max(0.0, min(ends) - self._clock()))) + 1

    def _wake_on(self, stop: threading.Event) -> None:
        stop.wait()
        with contextlib.suppress(zmq.ZMQError):  # the server may have ended by itself
            sender = self._context.socket(zmq.PUSH)
            sender.connect(self._wake_address)
            sender.send(b"")
            sender.close(linger=1000)

    # -- binding -----------------------------------------------------------------------------------------------
    def _bind(self, config: BrokerConfig) -> str:
        try:
            address = resolve(config.host)
            self._router.setsockopt(zmq.IPV6, int(":" in address))
            self._router.bind(f"tcp://{bracketed(address)}:{config.port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                text = f"port {config.port} of {config.host} is in use: set broker.port to a free one, or to 0"
                raise BrokerError(text) from error
            raise BrokerError(
                f"cannot bind broker.host = {config.host!r}, broker.port = {config.port}: {error}"
            ) from error
        except OSError as error:
            self.close()
            raise BrokerError(f"broker.host = {config.host!r} does not resolve: {error}") from error
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        port = endpoint.rstrip(b"\0").rpartition(b":")[2].decode()
        return f"tcp://{bracketed(reachable_host(config.host))}:{port}"
