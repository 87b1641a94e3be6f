"""Both ends of a ZeroMQ connection's beginning: who is let in, and why one is not.

client --CURVE--> server --ZAP (RFC 27)--> Door: is it the run's key?      each end's monitor tells what failed
"""

from __future__ import annotations

import logging
import uuid
from typing import TypeAlias

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from broker.errors import BrokerError
from broker.keys import ClientKeys, ServerKeys
from broker.ledger import Ledger

log = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"

UNAUTHENTICATED = "unauthenticated"  # among the ledger's events: connections turned away
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_CAUSES_REMEMBERED = 64


class Door:
    """The server's end. Without keys everyone on this machine is let in; what fails is counted all the same."""

    def __init__(self, socket: Socket, keys: ServerKeys | None, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: set[str] = set()
        self._allowed = z85.decode(keys.client_public) if keys else b""
        self._zap = socket.context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)  # one in a context: each server has a context of its own
        self._socket = socket
        if keys:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"slipstream")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # while nobody answers at the address above, nobody gets in
        self._monitor = _monitor(socket, _FAILED)

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        """What to poll; ``look`` when one can be read."""
        return self._zap, self._monitor

    def look(self) -> None:
        """Answers those who knock and counts those turned away."""
        while self._zap.poll(0):
            self._answer(self._zap.recv_multipart())
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._ledger.events[UNAUTHENTICATED] += 1
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._turned_away(_protocol_cause(event["value"], keys=bool(self._allowed)))
            elif self._allowed:  # it hung up first: which end sees what is wrong with the other is a matter of luck
                self._turned_away("someone who hangs up during the handshake: a client without the key, or a probe")

    def close(self) -> None:
        """Before the socket it stands at."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close()

    def _answer(self, frames: list[bytes]) -> None:
        """ZAP: version, request id, domain, address, identity, mechanism, credentials -> …, status code, text, …"""
        known = frames[5:] == [b"CURVE", self._allowed]
        if not known and len(frames) > 3:
            self._say(f"a client at {frames[3].decode('utf-8', 'replace')} has a key of another run")
        code = b"200" if known else b"400"
        self._zap.send_multipart([*frames[:2], code, b"", b"", b""])

    def _turned_away(self, cause: str) -> None:
        self._ledger.events[UNAUTHENTICATED] += 1
        self._say(cause)

    def _say(self, cause: str) -> None:
        """Once a cause: clients come back every second, and the log is not theirs to fill."""
        if cause not in self._seen and len(self._seen) < _CAUSES_REMEMBERED:
            self._seen.add(cause)
            log.warning("turned away: %s (broker.key_file, broker.security; said once, counted each time)", cause)


def _protocol_cause(value: int, *, keys: bool) -> str:
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "a client without a key" if keys else "a client with a key, where this broker has none"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "a client with the key of another broker"
    return "something that is no client of ours"


class Handshakes:
    """The client's end: shows the keys, and knows why the server does not let us in."""

    def __init__(self, socket: Socket, keys: ClientKeys | None, *, url: str, key_file: str) -> None:
        self._url, self._key_file, self._secured = url, key_file, keys is not None
        self._hint, self._new = "", False
        self._socket = socket
        if keys:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.monitor = _monitor(socket, _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def look(self) -> str:
        """What may be in the way, or an empty text. Raises BrokerError where trying again does not help."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hint, self._new = "", True
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise BrokerError(
                    f"the broker at {self._url} does not know our key: broker.key_file = {self._key_file} is of another"
                    " run; copy this broker's there"
                )
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                raise BrokerError(f"the broker at {self._url} {self._mismatch()}")
            else:
                self._hint = f"it hangs up during the handshake; {self._advice()}"
        return self._hint

    def new_connection(self) -> bool:
        """Whether there is one since this was last asked."""
        new, self._new = self._new, False
        return new

    def close(self) -> None:
        """Before the socket it watches."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)

    def _mismatch(self) -> str:
        if self._secured:
            return "wants no keys: set broker.security = none here, or curve where it runs"
        return "wants a key: set broker.security = curve, and broker.key_file to a copy of its broker.key"

    def _advice(self) -> str:
        if self._secured:
            return f"broker.key_file = {self._key_file} may be of another run"
        return "it may want a key (broker.security = curve, broker.key_file), or be no broker of ours"


def _monitor(socket: Socket, events: int) -> Socket:
    """Reads the socket's events. Without a limit: at one, ZeroMQ's own thread would wait for us."""
    address = f"inproc://monitor-{uuid.uuid4().hex}"
    socket.monitor(address, events)
    reader: Socket = socket.context.socket(zmq.PAIR)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(address)
    return reader
