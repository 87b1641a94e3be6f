"""What the broker's throughput is compared with: the bare transports, moving the same bytes in the same topology.

    one hop      4 x PUSH ──► PULL                        no process in between, so no buffer and no ledger
    two hops     4 x PUSH ──► PULL relay PUSH ──► PULL    what anything in a process of its own has to do
    Redis        4 x pipelined SET ──► server ──► pipelined GET

Every queue is as deep as ours is allowed to be, and every loop ends with the counter STOP or by its own deadline.
"""

from __future__ import annotations

import time
from typing import Any

import redis
import zmq

from benchmarks.figures import BenchmarkError
from benchmarks.processes import CONTEXT, Counters, Worker, told, workers

PRODUCERS = 4
DEPTH = 256  # groups under way in all, as with ours
SETS_PER_PIPELINE, GETS_PER_PIPELINE = 16, 32  # as many as ours leases, and takes, at once
SILENCE_S = 10.0
STOP, READ, WRITTEN = 0, 1, 1 + PRODUCERS  # indices of counters: the flag, then one per producer of each


class Meter:
    """Groups a second between the end of the warm-up and the end of the time to measure."""

    def __init__(self, warm_s: float, measure_s: float) -> None:
        self._warm_s, self._measure_s = warm_s, measure_s
        self._first = self._begin = self._last = 0.0
        self._groups = 0

    def count(self, groups: int) -> bool:
        """Takes in groups that have just arrived; True as long as more are wanted."""
        now = time.perf_counter()
        if not self._first:
            self._first = now
        elif self._begin:
            self._groups, self._last = self._groups + groups, now
        elif now - self._first >= self._warm_s:
            self._begin = now
        return not self._begin or now - self._begin < self._measure_s

    @property
    def started(self) -> bool:
        """Whether the warm-up is over."""
        return self._begin > 0.0

    def rate(self) -> float:
        """Groups a second."""
        return self._groups / (self._last - self._begin)


def push_pull(payload: bytes, warm_s: float, measure_s: float, *, relayed: bool) -> float:
    """Groups a second of bare ZeroMQ, over one hop or through a relay."""
    counters, urls = Counters(1), CONTEXT.Queue()
    sink = Worker(_pull, urls, counters, warm_s, measure_s)
    with workers(sink):
        url, between = told(urls), []
        if relayed:
            between.append(Worker(_relay, url, urls, counters))
            url = told(urls)
        sources = [Worker(_push, url, payload, counters) for _ in range(PRODUCERS)]
        with workers(*sources, *between):
            return sink.answer(warm_s + measure_s + 3 * SILENCE_S)


def set_get(url: str, payload: bytes, warm_s: float, measure_s: float) -> float:
    """Groups a second of bare redis-py: written once and read once, over a ring of keys that bounds the memory.

    Who may write and read what is told by counters in shared memory, which costs Redis nothing.
    """
    counters = Counters(1 + 2 * PRODUCERS)
    sink = Worker(_get, url, counters, warm_s, measure_s)
    sources = [Worker(_set, url, payload, counters, index) for index in range(PRODUCERS)]
    with workers(sink, *sources):
        return sink.answer(warm_s + measure_s + 3 * SILENCE_S)


def _socket(kind: int, depth: int) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(kind)
    socket.set_hwm(depth)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(1000 * SILENCE_S))
    socket.setsockopt(zmq.SNDTIMEO, int(1000 * SILENCE_S))
    return socket


def _bind(socket: zmq.Socket[bytes]) -> str:
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def _push(url: str, payload: bytes, counters: Counters) -> None:
    socket = _socket(zmq.PUSH, DEPTH // PRODUCERS // 2)  # half in the sender's queue, half in the receiver's
    socket.connect(url)
    while not counters[STOP]:
        socket.send(payload)


def _pull(urls: Any, counters: Counters, warm_s: float, measure_s: float) -> float:
    socket = _socket(zmq.PULL, DEPTH // PRODUCERS // 2)
    urls.put(_bind(socket))
    meter = Meter(warm_s, measure_s)
    while meter.count(1 if socket.recv() else 0):
        pass
    counters[STOP] = 1
    return meter.rate()


def _relay(url: str, urls: Any, counters: Counters) -> None:
    front, back = _socket(zmq.PULL, DEPTH // PRODUCERS // 2), _socket(zmq.PUSH, DEPTH // PRODUCERS // 2)
    back.connect(url)
    urls.put(_bind(front))
    while not counters[STOP]:
        back.send(front.recv())


def _set(url: str, payload: bytes, counters: Counters, index: int) -> None:
    ring, written = DEPTH // PRODUCERS, 0
    with redis.Redis.from_url(url, socket_timeout=SILENCE_S) as client:
        while not counters[STOP]:
            if written + SETS_PER_PIPELINE - counters[READ + index] > ring:
                time.sleep(0.0002)
                continue
            pipeline = client.pipeline(transaction=False)
            for serial in range(written, written + SETS_PER_PIPELINE):
                pipeline.set(f"reference:{index}:{serial % ring}", payload)
            pipeline.execute()
            written += SETS_PER_PIPELINE
            counters[WRITTEN + index] = written


def _get(url: str, counters: Counters, warm_s: float, measure_s: float) -> float:
    ring, meter, heard = DEPTH // PRODUCERS, Meter(warm_s, measure_s), time.monotonic()
    read = [0] * PRODUCERS
    with redis.Redis.from_url(url, socket_timeout=SILENCE_S) as client:
        wanted = True
        while wanted:
            ready = [(i, serial) for i in range(PRODUCERS) for serial in range(read[i], counters[WRITTEN + i])]
            ready = ready[:GETS_PER_PIPELINE]
            if not ready:
                if time.monotonic() - heard > SILENCE_S:
                    raise BenchmarkError(f"nothing was written for {SILENCE_S:g} s")
                time.sleep(0.0002)
                continue
            pipeline = client.pipeline(transaction=False)
            for index, serial in ready:
                pipeline.get(f"reference:{index}:{serial % ring}")
            if not all(pipeline.execute()):
                raise BenchmarkError("a key that was written is not there")
            for index, serial in ready:
                read[index] = counters[READ + index] = serial + 1
            wanted, heard = meter.count(len(ready)), time.monotonic()
    counters[STOP] = 1
    return meter.rate()
