"""Child processes of a benchmark: each dies with it, sends one answer back, and is waited for with a deadline.

They are forked, which starts them in milliseconds, and are the benchmark's own children, so that die_with works: with a
fork server between, they would outlive a benchmark that is killed. Forking is safe as long as the benchmark itself
opens no ZeroMQ context and leaves the work to its children.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import resource
import signal
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_longlong
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, Literal, TypeVar

import redis
import zmq

from benchmarks.figures import BenchmarkError
from broker.config import BrokerConfig
from broker.lifetime import die_with
from broker.redis_server import RedisServer
from broker.server import BrokerServer

T = TypeVar("T")
Backend = Literal["zmq", "redis"]

START_TIMEOUT_S = 30.0
SOCKETS = 8192  # ZeroMQ's own default of 1023 is less than a thousand clients and their servers

CONTEXT = multiprocessing.get_context("fork")


class Counters:
    """Numbers that several processes see; each is written by one of them only. They cost no message."""

    def __init__(self, count: int) -> None:
        self._values: Any = CONTEXT.RawArray(c_longlong, count)

    def __getitem__(self, index: int) -> int:
        return int(self._values[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._values[index] = value


class Worker(Generic[T]):
    """A process that runs ``work(*args)``."""

    def __init__(self, work: Callable[..., T], *args: Any) -> None:
        self._name = work.__name__
        self._answers, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_work, args=(os.getpid(), theirs, work, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def check(self) -> None:
        """Raises BenchmarkError if ``work`` has failed."""
        if not self._process.is_alive() or self._answers.poll(0):
            self.answer(0.0)

    def answer(self, timeout_s: float) -> T:
        """What ``work`` returned. Raises BenchmarkError when it failed or is not done in time."""
        if not self._answers.poll(timeout_s):
            raise BenchmarkError(f"{self._name} has not answered within {timeout_s:g} s")
        try:
            fine, value = self._answers.recv()
        except EOFError:
            raise BenchmarkError(f"{self._name} died") from None
        if not fine:
            raise BenchmarkError(f"{self._name} failed:\n{value}")
        return value  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Ends the process; a second call does nothing."""
        self._process.kill()
        self._process.join(10)


@contextmanager
def workers(*started: Worker[Any]) -> Iterator[None]:
    """Ends these processes on the way out, also when one of them has failed."""
    try:
        yield
    finally:
        for worker in started:
            worker.stop()


@dataclass(frozen=True, kw_only=True)
class Running:
    """A broker in a process of its own."""

    backend: Backend
    config: BrokerConfig
    url: str
    pid: int

    def fresh(self) -> BrokerConfig:
        """A configuration for one more ledger on this broker (Redis only: a namespace of its own)."""
        return self.config.model_copy(update={"namespace": uuid.uuid4().hex})


@contextmanager
def running(backend: Backend) -> Iterator[Running]:
    """Starts a broker with an empty ledger and ends it."""
    config = BrokerConfig(backend=backend, namespace=uuid.uuid4().hex)
    if backend == "redis":
        server = RedisServer(config)
        try:
            yield Running(backend=backend, config=config, url=server.url, pid=server.pid)
        finally:
            server.stop()
        return
    urls = CONTEXT.Queue()
    worker = Worker(_serve, config, urls)
    with workers(worker):
        yield Running(backend=backend, config=config, url=told(urls), pid=worker.pid)


def told(urls: Any) -> str:
    """The address that a started process has put into this queue."""
    try:
        return str(urls.get(timeout=START_TIMEOUT_S))
    except queue.Empty:
        raise BenchmarkError(f"a server was not ready within {START_TIMEOUT_S:g} s") from None


def flush(url: str) -> None:
    """Empties a Redis server that this benchmark has started."""
    with redis.Redis.from_url(url, socket_timeout=30.0) as client:
        client.flushall()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def _serve(config: BrokerConfig, urls: Any) -> None:
    server = BrokerServer(config)
    urls.put(server.url)
    server.run(threading.Event())


def _work(parent_pid: int, answers: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark itself gets it, and ends us
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a thousand clients are a thousand connections
    zmq.Context.instance().set(zmq.MAX_SOCKETS, SOCKETS)
    try:
        answers.send((True, work(*args)))
    except BaseException:
        answers.send((False, traceback.format_exc()))
