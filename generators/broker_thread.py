"""Lets the event loop call a broker client, which blocks and belongs to one thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from broker.contract import Broker
from broker.errors import BrokerClosed

T = TypeVar("T")


class BrokerThread:
    """One daemon thread with one client. Calls run in the order in which they were made.

    A daemon, so that a call to a silent broker cannot keep the process from ending. The queue is as long as there are
    coroutines that wait for an answer, which the generator bounds.
    """

    def __init__(self, connect: Callable[[], Broker], name: str) -> None:
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[Broker], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, ask: Callable[[Broker], T]) -> T:
        """``ask(client)``, in the thread. Cancelling the await does not end a call that has begun."""
        if self._closed:
            raise BrokerClosed("this connection to the broker is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((ask, answer))
        return await answer

    def close(self) -> None:
        """Closes the client behind the calls already made, without waiting for it."""
        self._closed = True
        self._calls.put(None)

    def _run(self) -> None:
        """Waits for calls; ended by ``close``."""
        client: Broker | None = None
        while (entry := self._calls.get()) is not None:
            ask, answer = entry
            if answer.cancelled():
                continue
            try:
                client = client or self._connect()
                value, error = ask(client), None
            except BaseException as raised:  # handed to whoever awaits the answer
                value, error = None, raised
            if self._loop.is_closed():
                break
            self._loop.call_soon_threadsafe(_settle, answer, value, error)
        if client is not None:
            client.close()


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)
