"""The ZeroMQ client: one outstanding call, sent again until the broker has answered."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from broker.caller import Caller, fresh_token
from broker.calls import Bodies, Call
from broker.codec import decode, encode
from broker.config import BrokerConfig
from broker.errors import BrokerUnreachable, Refused
from broker.wire import ERRORS, HEAD_BYTES, NO_REQUEST, WAITING, ReplyHead, RequestHead, read_value

T = TypeVar("T")

FIRST_PAUSE_S = 1.0  # until a request without an answer is sent again; doubles up to LAST_PAUSE_S
LAST_PAUSE_S = 5.0


class ZmqBroker(Caller):
    """A DEALER with a name of its own, by which the server recognises a request sent again.

    Silence is told from waiting by sending again: a live server answers "still waiting".
    """

    def __init__(self, config: BrokerConfig, url: str, *, token: Callable[[], str] = fresh_token) -> None:
        super().__init__(config, token=token)
        self._url = url
        self._timeout_s = config.reconnect_timeout_s
        self._max_bytes = config.max_frame_bytes
        self._request_id = 0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 0)  # a call returns when it is answered, so nothing is left to send
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a broker that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * config.max_frame_bytes)
        self._socket.connect(url)

    def close(self) -> None:
        """See broker.contract.Broker."""
        super().close()
        self._socket.close()

    def _exchange(self, call: Call[T], bodies: Bodies, wait_s: float) -> tuple[T, Bodies]:
        frames = [encode(call), *bodies]
        if len(frames[0]) > self._max_bytes:
            name = type(call).__name__
            raise Refused(f"{name} of {len(frames[0])} bytes is over broker.max_frame_bytes = {self._max_bytes}")
        self._request_id += 1
        now = time.monotonic()
        until, silent_until, send_at = now + wait_s, now + self._timeout_s, now
        pause = min(FIRST_PAUSE_S, self._timeout_s / 4)
        while True:
            now = time.monotonic()
            if now >= silent_until:
                raise BrokerUnreachable(
                    f"the broker at {self._url} has been silent for broker.reconnect_timeout_s = "
                    f"{self._timeout_s:g}: is it running, and is broker.url right?"
                )
            if now >= send_at and self._send(call, frames, max(0.0, until - now)):
                send_at, pause = now + pause, min(2 * pause, LAST_PAUSE_S, self._timeout_s / 4)
            reply = self._receive(due=now >= send_at, timeout_s=min(silent_until, max(send_at, now)) - now)
            if reply is None:
                continue
            silent_until = time.monotonic() + self._timeout_s
            if reply:
                return read_value(call, reply, max_bytes=self._max_bytes)

    def _send(self, call: Call[Any], frames: list[bytes], wait_s: float) -> bool:
        head = RequestHead(request_id=self._request_id, call=type(call).__name__, wait_s=wait_s)
        try:
            self._socket.send_multipart([encode(head), *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, *, due: bool, timeout_s: float) -> list[bytes] | None:
        """Frames of the answer's value; empty for "still waiting"; None when there is no answer to this request.

        ``due``: the request is still to be sent, so wake as soon as the connection takes it.
        """
        flags = zmq.POLLIN | (zmq.POLLOUT if due else 0)
        timeout_s = self._timeout_s if due else timeout_s
        if not self._socket.poll(int(1000 * timeout_s) + 1, flags) & zmq.POLLIN:
            return None
        first, *frames = self._socket.recv_multipart()
        head = decode(first, ReplyHead, max_bytes=HEAD_BYTES)
        if head.request_id not in (self._request_id, NO_REQUEST):
            return None
        if head.outcome in ERRORS:
            raise ERRORS[head.outcome](head.text)
        return [] if head.outcome == WAITING else frames
