"""The ZeroMQ broker: one thread, one ledger, answers deferred instead of polled for.

    request -> decode -> answer(ledger) -> value        reply at once
                                        -> PENDING      a waiter: asked again after every change of the ledger,
                                                        and for the last time at its deadline
The loop waits for a request, the earliest deadline of a waiter, the next lease or member to expire, or ``stop``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from broker.calls import PENDING, Call, EvalResults, LeasePrompts, TakeBatch, answer
from broker.codec import decode
from broker.config import BrokerConfig
from broker.errors import BrokerError, NoOpenRun, Refused, RunFinished
from broker.ledger import Ledger
from broker.wire import HEAD_BYTES, NO_REQUEST, RequestHead, error_reply, read_call, value_reply, waiting_reply

log = logging.getLogger(__name__)

CLIENTS_REMEMBERED = 1024  # last answers kept for a request sent again; the longest silent client is forgotten first
REQUESTS_PER_TURN = 64  # taken in before waiters are looked at, so that a busy sender cannot hold up the rest


@dataclass(slots=True)
class Session:
    """What one client asked last: a waiting call until ``deadline``, or the answer it got."""

    request_id: int
    call: Call[Any] | None = None
    deadline: float = 0.0
    reply: list[bytes] | None = None


class BrokerServer:
    """Binds in the constructor and keeps the port; ``run`` serves until ``stop``."""

    def __init__(self, config: BrokerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger = Ledger()
        self._max_bytes = config.max_frame_bytes
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._waiting: dict[bytes, Session] = {}  # in order of arrival: first come, first served
        self._seen_changes = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
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
        self.url = self._bind(config)

    def run(self, stop: threading.Event) -> None:
        """Serves until ``stop`` is set, then closes."""
        threading.Thread(target=self._wake_on, args=(stop,), name="broker-stop", daemon=True).start()
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._wake not in dict(poller.poll(self._pause_ms())):
                self._take_requests()
                self.ledger.expire(self._clock())
                self._ask_again()
        finally:
            self.close()

    def close(self) -> None:
        """Frees the port."""
        self._router.close()
        self._wake.close(linger=0)

    # -- requests ----------------------------------------------------------------------------------------------
    def _take_requests(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(sender, frames)

    def _take(self, sender: bytes, frames: list[bytes]) -> None:
        head: RequestHead | None = None
        try:
            head = decode(frames[0] if frames else b"", RequestHead, max_bytes=HEAD_BYTES)
            session = self._sessions.get(sender)
            if session is not None and head.request_id <= session.request_id:
                self._repeat(sender, session, head)
                return
            call = read_call(head, frames[1:], max_bytes=self._max_bytes)
        except Refused as error:
            self.ledger.events["malformed"] += 1
            log.warning("refused a request: %s", error)
            self._send(sender, error_reply(head.request_id if head else NO_REQUEST, error))
            return
        session = Session(head.request_id, call, self._clock() + head.wait_s)
        self._remember(sender, session)
        self._waiting[sender] = session
        self._try(sender, session)

    def _repeat(self, sender: bytes, session: Session, head: RequestHead) -> None:
        """The client did not see an answer in time: say so again, or that the call still waits."""
        if head.request_id == session.request_id:
            self._send(sender, session.reply or waiting_reply(session.request_id))

    def _try(self, sender: bytes, session: Session) -> None:
        """Answers the call if it can be answered now."""
        call, now = session.call, self._clock()
        assert call is not None
        try:
            value = answer(self.ledger, call, now=now, last=now >= session.deadline)
        except (Refused, NoOpenRun, RunFinished) as error:
            self._reply(sender, session, error_reply(session.request_id, error))
            return
        if value is PENDING:
            return
        delivered = self._reply(sender, session, value_reply(session.request_id, call, value))
        if isinstance(call, LeasePrompts) and not delivered:
            for lease in value:  # nobody got them: better now than after broker.lease_timeout_s
                self.ledger.release(lease_id=lease.lease_id, error="")

    def _reply(self, sender: bytes, session: Session, frames: list[bytes]) -> bool:
        """Sends the answer and remembers it, unless the call repeats to the same answer anyway and may be large."""
        del self._waiting[sender]
        delivered = self._send(sender, frames)
        if not delivered or isinstance(session.call, TakeBatch | EvalResults):
            del self._sessions[sender]
        else:
            session.call, session.reply = None, frames
        return delivered

    def _send(self, sender: bytes, frames: list[bytes]) -> bool:
        try:
            self._router.send_multipart([sender, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _remember(self, sender: bytes, session: Session) -> None:
        self._waiting.pop(sender, None)
        self._sessions.pop(sender, None)
        self._sessions[sender] = session
        while len(self._sessions) > CLIENTS_REMEMBERED:
            forgotten, _ = self._sessions.popitem(last=False)
            self._waiting.pop(forgotten, None)

    # -- waiters -----------------------------------------------------------------------------------------------
    def _ask_again(self) -> None:
        """Looks at the waiters whose time is over, and at all of them as long as the ledger changes."""
        now = self._clock()
        for sender, session in list(self._waiting.items()):
            if session.deadline <= now:
                self._try(sender, session)
        while self._seen_changes != self.ledger.changes:
            self._seen_changes = self.ledger.changes
            for sender, session in list(self._waiting.items()):
                self._try(sender, session)

    def _pause_ms(self) -> int | None:
        ends = [session.deadline for session in self._waiting.values()]
        expiry = self.ledger.next_deadline()
        ends += [] if expiry is None else [expiry]
        return None if not ends else max(0, int(1000 * (min(ends) - self._clock())) + 1)

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
            address = socket.gethostbyname(config.host)
            self._router.bind(f"tcp://{address}:{config.port or '*'}")
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
        return f"tcp://{reachable_host(config.host)}:{port}"


def reachable_host(host: str) -> str:
    """The name under which others reach a server bound to ``host``: for 0.0.0.0, the address of the default route."""
    if host != "0.0.0.0":
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737 documentation address; connecting UDP sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
