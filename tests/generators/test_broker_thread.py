from __future__ import annotations

import asyncio
import threading

import pytest

from broker.errors import BrokerClosed, RunFinished
from broker.local import LocalBroker
from generators.broker_thread import BrokerThread


class Recorder(LocalBroker):
    """Notes the thread of each call that a test makes through ``note``."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, str]] = []
        self.closed = threading.Event()

    def note(self, what: str) -> str:
        self.notes.append((what, threading.current_thread().name))
        return what

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_calls_run_in_their_order_in_one_thread() -> None:
    recorder = Recorder()

    async def test() -> list[str]:
        thread = BrokerThread(lambda: recorder, "the-thread")
        return await asyncio.gather(*(thread.call(lambda broker, i=i: broker.note(str(i))) for i in range(20)))

    assert asyncio.run(test()) == [str(i) for i in range(20)]
    assert recorder.notes == [(str(i), "the-thread") for i in range(20)]


def test_an_error_reaches_whoever_asked_and_the_next_call_still_works() -> None:
    recorder = Recorder()

    def fail(broker: object) -> None:
        raise RunFinished("done")

    async def test() -> str:
        thread = BrokerThread(lambda: recorder, "t")
        with pytest.raises(RunFinished, match="done"):
            await thread.call(fail)
        return await thread.call(lambda broker: broker.note("after"))

    assert asyncio.run(test()) == "after"


def test_an_unreachable_broker_is_the_error_of_the_call() -> None:
    def refuse() -> LocalBroker:
        raise OSError("no route")

    async def test() -> None:
        with pytest.raises(OSError, match="no route"):
            await BrokerThread(refuse, "t").call(lambda broker: broker.state())

    asyncio.run(test())


def test_closing_closes_the_client_behind_the_calls_made_and_refuses_later_ones() -> None:
    recorder = Recorder()

    async def test() -> None:
        thread = BrokerThread(lambda: recorder, "t")
        first = asyncio.ensure_future(thread.call(lambda broker: broker.note("first")))
        await asyncio.sleep(0)
        thread.close()
        assert await first == "first"
        with pytest.raises(BrokerClosed):
            await thread.call(lambda broker: broker.note("late"))

    asyncio.run(test())
    assert recorder.closed.wait(5.0)
