"""The ZeroMQ client: one outstanding call, sent again until the broker has answered."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import zmq

from broker.caller import Caller, fresh_token
from broker.calls import Bodies, Call
from broker.codec import decode, encode
from broker.config import BrokerConfig
from broker.errors import Refused
from broker.handshake import Handshakes
from broker.keys import client_keys
from broker.silence import Silence
from broker.wire import (
    ERRORS,
    HEAD_BYTES,
    NO_REQUEST,
    OK,
    PROBE,
    UNKNOWN,
    ReplyHead,
    RequestHead,
    lent,
    read_value,
    send_parts,
)

T = TypeVar("T")

ANSWER_BYTES = (
    1 << 26
)  # of an answer without its bodies: members, dead prompts; however small broker.max_frame_bytes is
FIRST_PAUSE_S = 1.0  # until a request without an answer is sent again; doubles up to LAST_PAUSE_S
LAST_PAUSE_S = 5.0


class ZmqBroker(Caller):
    """A DEALER with a name of its own, by which the server recognises a request sent again.

    Silence is told from waiting by a probe: a live server answers "waiting", or "unknown", and then the request is sent
    again. A probe goes the way of the request, so that it cannot overtake one that a slow link is still sending.
    """

    def __init__(self, config: BrokerConfig, url: str, *, token: Callable[[], str] = fresh_token) -> None:
        super().__init__(config, token=token)
        self._timeout_s = config.reconnect_timeout_s
        self._max_bytes = config.max_frame_bytes
        self._request_id = 0
        self._url = url
        keys = client_keys(config, url)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 0)  # a call returns when it is answered, so nothing is left to send
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a broker that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * max(config.max_frame_bytes, ANSWER_BYTES))
        if "[" in url:  # for all, and ZeroMQ would look for IPv6 addresses of names only
            self._socket.setsockopt(zmq.IPV6, 1)
        self._handshakes = Handshakes(self._socket, keys, url=url, key_file=config.key_file)
        self._poller = zmq.Poller()
        self._poller.register(self._handshakes.monitor, zmq.POLLIN)
        self._socket.connect(url)

    def close(self) -> None:
        """See broker.contract.Broker."""
        super().close()
        if not self._socket.closed:
            self._handshakes.close()
            self._socket.close()

    def _exchange(self, call: Call[T], bodies: Bodies, wait_s: float) -> tuple[T, Bodies]:
        frames = [encode(call), *bodies]
        if len(frames[0]) > self._max_bytes:
            name = type(call).__name__
            raise Refused(f"{name} of {len(frames[0])} bytes is over broker.max_frame_bytes = {self._max_bytes}")
        self._request_id += 1
        silence, now, sent = Silence(self._url, self._timeout_s), time.monotonic(), False
        until, send_at = now + wait_s, now
        pause = min(FIRST_PAUSE_S, self._timeout_s / 4)
        while True:
            silence.check(self._handshakes.look())
            now = time.monotonic()
            if self._handshakes.new_connection() and sent:  # whatever was on the way is lost: ask at once
                send_at, pause = now, min(FIRST_PAUSE_S, self._timeout_s / 4)
            if now >= send_at:
                silence.asked()
                name = PROBE if sent else type(call).__name__
                if self._send(name, [] if sent else frames, max(0.0, until - now)):
                    send_at, pause, sent = now + pause, min(2 * pause, LAST_PAUSE_S, self._timeout_s / 4), True
            answer = self._receive(send_in_s=send_at - now, left_s=silence.left_s())
            if answer is None:
                continue
            silence.ended()
            outcome, reply = answer
            if outcome == OK:
                return read_value(call, reply, max_bytes=max(self._max_bytes, ANSWER_BYTES))
            if outcome == UNKNOWN:
                send_at, sent = now, False

    def _send(self, name: str, frames: list[bytes], wait_s: float) -> bool:
        head = RequestHead(request_id=self._request_id, call=name, wait_s=wait_s)
        try:
            send_parts(self._socket, [encode(head), *frames])
        except zmq.Again:
            return False
        return True

    def _receive(self, *, send_in_s: float, left_s: float) -> tuple[str, list[bytes]] | None:
        """The outcome and the frames of the answer's value; None when there is no answer to this request.

        Wakes when the request is to be sent: at its time, or from then on as soon as the connection takes it.
        """
        due = send_in_s <= 0
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if due else 0))
        timeout_s = left_s if due else min(send_in_s, left_s)
        ready = dict(self._poller.poll(int(1000 * max(0.0, timeout_s)) + 1))
        if not ready.get(self._socket, 0) & zmq.POLLIN:
            return None
        first, *frames = lent(self._socket.recv_multipart(copy=False))
        head = decode(first, ReplyHead, max_bytes=HEAD_BYTES)
        if head.request_id not in (self._request_id, NO_REQUEST):
            return None
        if head.outcome in ERRORS:
            raise ERRORS[head.outcome](head.text)
        return head.outcome, frames
