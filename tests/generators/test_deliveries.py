"""Finished groups on their way to the broker: together where they can be, each with an outcome of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from broker.contract import PushOutcome
from broker.errors import BrokerUnreachable, Refused
from broker.local import LocalBroker
from broker.messages import Group
from generators.broker_thread import BrokerThread
from generators.deliveries import Deliveries


class Slow(LocalBroker):
    """Notes what is pushed together; its first push waits for ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[list[Any]] = []
        self.go = threading.Event()
        self.error: Exception | None = None
        self.settles = 0  # groups before a refused one whose outcome is known

    def push_all(self, groups: Sequence[Group]) -> tuple[PushOutcome, ...]:
        names: list[Any] = list(groups)
        self.pushes.append(names)
        assert self.go.wait(10.0)
        if self.error is not None:
            raise self.error
        if "bad" in names:
            refusal = Refused("bad")
            refusal.settled = dict.fromkeys(range(min(self.settles, names.index("bad"))), PushOutcome.ACCEPTED)
            raise refusal
        return tuple(PushOutcome.DUPLICATE if one == "late" else PushOutcome.ACCEPTED for one in names)


async def pushed(broker: Slow, names: Sequence[str], *, cancel: Sequence[str] = ()) -> dict[str, Any]:
    """The first alone; the others while it is under way."""
    deliveries = Deliveries(BrokerThread(lambda: broker, "deliveries"), BrokerThread(lambda: broker, "releases"))
    tasks: dict[str, asyncio.Task[Any]] = {}
    for name in names:
        group: Any = name
        tasks[name] = asyncio.create_task(deliveries.push(group))
        while not broker.pushes:
            await asyncio.sleep(0.001)
    for name in cancel:
        tasks[name].cancel()
    await asyncio.sleep(0)
    broker.go.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 10.0)
    deliveries.close()
    return dict(zip(tasks, results, strict=True))


def test_groups_that_finish_while_a_push_is_under_way_go_together() -> None:
    broker = Slow()
    found = asyncio.run(pushed(broker, ["a", "b", "late", "c"]))
    assert broker.pushes == [["a"], ["b", "late", "c"]]
    assert {name for name, outcome in found.items() if outcome is PushOutcome.ACCEPTED} == {"a", "b", "c"}
    assert found["late"] is PushOutcome.DUPLICATE


def test_many_go_in_parts_that_one_call_takes() -> None:
    broker = Slow()
    names = [str(i) for i in range(40)]
    found = asyncio.run(pushed(broker, names))
    assert [len(one) for one in broker.pushes] == [1, 16, 16, 7]
    assert list(found) == names and set(found.values()) == {PushOutcome.ACCEPTED}


def test_a_refused_group_is_the_error_of_its_own_push_alone() -> None:
    broker = Slow()
    found = asyncio.run(pushed(broker, ["a", "b", "bad", "c"]))
    assert isinstance(found.pop("bad"), Refused)
    assert set(found.values()) == {PushOutcome.ACCEPTED}
    assert broker.pushes == [["a"], ["b", "bad", "c"], ["b"], ["bad"], ["c"]]


def test_what_was_settled_before_a_refused_group_is_not_pushed_again() -> None:
    broker = Slow()
    broker.settles = 2
    found = asyncio.run(pushed(broker, ["a", "b", "c", "bad", "d"]))
    assert isinstance(found.pop("bad"), Refused)
    assert set(found.values()) == {PushOutcome.ACCEPTED}
    assert broker.pushes == [["a"], ["b", "c", "bad", "d"], ["bad"], ["d"]]


def test_a_push_that_is_cancelled_before_its_turn_is_not_made() -> None:
    broker = Slow()
    found = asyncio.run(pushed(broker, ["a", "b", "c"], cancel=["b"]))
    assert broker.pushes == [["a"], ["c"]]
    assert isinstance(found["b"], asyncio.CancelledError)


@pytest.mark.parametrize("error", [BrokerUnreachable("silent"), MemoryError("none left")])
def test_an_error_of_the_broker_reaches_everyone_who_waits(error: Exception) -> None:
    broker = Slow()
    broker.error = error
    found = asyncio.run(pushed(broker, ["a", "b"]))
    assert list(found.values()) == [error, error]
