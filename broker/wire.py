"""How calls and answers travel over ZeroMQ.

    request: [RequestHead, call, body, …]            answer: [ReplyHead, value, body, …]

Bodies (prompts, groups) are frames of their own, so that ``broker.max_frame_bytes`` bounds one group, not a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import zmq

from broker.calls import CALLS, Bodies, Call, Feed, Push, PutBlob, answer_type
from broker.codec import decode, encode
from broker.errors import BrokerError, NoOpenRun, Refused, RunFinished
from broker.rules import PROMPTS_PER_CALL

OK, WAITING, UNKNOWN = "ok", "waiting", "unknown"
PROBE = "?"  # in the place of a call: asks what has become of the request of this number, whose frames were sent
HEAD_BYTES = 1 << 16
MOST_PARTS = 2 * PROMPTS_PER_CALL  # of a request; the largest has a head, a call and the prompts
TEXT_CHARACTERS = 1000  # of an error, which may tell of what was sent
ERRORS: dict[str, type[BrokerError]] = {"refused": Refused, "no_open_run": NoOpenRun, "finished": RunFinished}
LEND_BYTES = 1 << 15
NO_REQUEST = -1  # answers a request whose head could not be read


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    """``request_id`` grows with every call of a client; a request sent again keeps its own."""

    request_id: int
    call: str
    wait_s: float


@dataclass(frozen=True, kw_only=True)
class ReplyHead:
    """What became of a request.

    ``outcome``: ``ok`` (a value follows), ``waiting`` (alive, not yet), ``unknown`` (asked for by a probe, it has not
    arrived or its answer is no longer kept: send it again), or a key of ERRORS with its text.
    """

    request_id: int
    outcome: str
    text: str


def lent(frames: Sequence[zmq.Frame]) -> list[bytes]:
    """The frames' bytes; large ones stay in ZeroMQ's memory and are as good as bytes to be read, kept and sent on.

    Small ones share a buffer of 8 KiB with their neighbours, and keeping one would keep it whole.
    """
    return [one.bytes if len(one) < LEND_BYTES else cast(bytes, one) for one in frames]


def receive_parts(socket: zmq.Socket[bytes], *, most_bytes: int) -> tuple[list[zmq.Frame], str]:
    """The next message's parts, the sender's name first, and what is wrong with it: too many or too large.

    Of such a message the first two parts are left; the others are thrown away as they come. Raises zmq.Again.
    """
    parts, size, problem = [socket.recv(zmq.NOBLOCK, copy=False)], 0, ""
    while parts[-1].more if not problem else socket.getsockopt(zmq.RCVMORE):
        if problem:
            socket.recv(zmq.NOBLOCK)
            continue
        parts.append(socket.recv(zmq.NOBLOCK, copy=False))
        size += len(parts[-1])
        if len(parts) > MOST_PARTS:
            problem = f"a request of more than {MOST_PARTS} frames"
        elif size > most_bytes:
            problem = f"a request of more than {most_bytes} bytes, twice broker.max_frame_bytes"
    return (parts[:2] if problem else parts), problem


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """A message of several frames, without waiting; those that are ``lent`` are not copied. Raises zmq.ZMQError."""
    last = len(parts) - 1
    for i, part in enumerate(parts):
        socket.send(part, zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0), copy=type(part) is bytes)


def error_reply(request_id: int, error: BrokerError) -> list[bytes]:
    """The answer that makes the client raise this error."""
    name = {kind: name for name, kind in ERRORS.items()}[type(error)]
    return [encode(ReplyHead(request_id=request_id, outcome=name, text=str(error)[:TEXT_CHARACTERS]))]


def bare_reply(request_id: int, outcome: str) -> list[bytes]:
    """The answer to a probe: the request waits, or is unknown."""
    return [encode(ReplyHead(request_id=request_id, outcome=outcome, text=""))]


def value_reply(request_id: int, call: Call[Any], value: Any, bodies: Bodies) -> list[bytes]:
    """The answer that carries a value and its bodies."""
    head = encode(ReplyHead(request_id=request_id, outcome=OK, text=""))
    return [head, encode(value, answer_type(type(call))), *bodies]


def read_value(call: Call[Any], frames: Sequence[bytes], *, max_bytes: int) -> tuple[Any, Bodies]:
    """The value of an answer and its bodies, from the frames after its head. Raises Refused when malformed."""
    if not frames:
        raise Refused("an answer without a value")
    return decode(frames[0], answer_type(type(call)), max_bytes=max_bytes), frames[1:]


def read_call(head: RequestHead, frames: Sequence[bytes], *, max_bytes: int) -> tuple[Call[Any], Bodies]:
    """The call of a request and its bodies, from the frames after its head. Raises Refused when malformed."""
    kind = CALLS.get(head.call)
    if kind is None or not frames:
        raise Refused(f"no call {head.call[:64]!r} with {len(frames)} frames is known here")
    for frame in frames:
        if len(frame) > max_bytes:
            raise Refused(f"a frame of {len(frame)} bytes is over broker.max_frame_bytes = {max_bytes}")
    if not 0 <= head.wait_s < math.inf:  # and not NaN
        raise Refused(f"a request that waits for {head.wait_s} seconds")
    call, bodies = decode(frames[0], kind, max_bytes=max_bytes), frames[1:]
    expected = len(call.items) if isinstance(call, Feed) else len(call.heads) if isinstance(call, Push) else 0
    expected += isinstance(call, PutBlob)
    if len(bodies) != expected:
        raise Refused(f"{head.call} with {len(bodies)} bodies, where {expected} were expected")
    return call, bodies
