"""Who waits for the broker is told as soon as there is something to tell, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis

from broker.calls import LeasePrompts
from broker.client import ZmqBroker
from broker.codec import encode
from broker.config import BrokerConfig
from broker.connect import connect
from broker.contract import Broker, PushOutcome
from broker.errors import BufferFull, Refused, RunFinished
from broker.local import LocalBroker
from broker.messages import Frontier, Lease, Member, MemberState
from broker.server import SWEEP_AT, BrokerServer
from broker.wire import RequestHead
from generators.broker_thread import BrokerThread
from generators.deliveries import Deliveries

LONG_S = 30.0
SOON_S = 3.0


def lease(broker: Broker, n: int = 1, version: int = 0) -> tuple[Lease, ...]:
    return broker.lease(member_id="g", policy_version=version, incarnation=0, max_prompts=n, wait_s=0.0)


def open_small(broker: Broker, make: Any, **changes: Any) -> tuple[Lease, ...]:
    """A buffer with room for one group, the one that is needed, and three leases."""
    rules = {"groups_per_step": 1, "max_staleness": 3, "max_buffer_bytes": 1} | changes
    broker.open_run(rules=make.rules(**rules), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(4)))
    return lease(broker, 3)


def member(name: str, **changes: Any) -> Member:
    state = MemberState.SERVING
    known = Member(
        member_id=name, role="generator", state=state, policy_version=0, incarnation=0, host="h", pid=1, life=name
    )
    return replace(known, **changes)


def test_a_batch_larger_than_the_buffer_is_gathered_one_lease_at_a_time(hub: Any, make: Any) -> None:
    """Only for the batch being gathered: beyond it nothing is leased."""
    broker: Broker = hub.client()
    rules = make.rules(groups_per_step=4, max_staleness=3, max_buffer_bytes=1)
    broker.open_run(rules=rules, version=0, frontier=Frontier())
    broker.feed(make.prompts(range(12)))
    for version in range(3):
        for _ in range(4):
            (one,) = lease(broker, 1, version)
            assert broker.push(make.group(one, ((version, 4),))) is PushOutcome.ACCEPTED
        assert lease(broker, 1, version) == ()
        batch = broker.take_batch(version=version, wait_s=0.0)
        assert batch is not None
        broker.trained(batch_id=batch.batch_id, version=version + 1)


@pytest.fixture
def waiting(hub: Any, make: Any) -> Iterator[tuple[Broker, Future[PushOutcome]]]:
    """The learner's client, and a push that has found no room."""
    learner, generator = hub.client(), hub.client()
    one, two, _ = open_small(learner, make, lease_timeout_s=2.0)
    learner.push(make.group(one))
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(generator.push, make.group(two))
        time.sleep(0.3)
        assert not pushed.done()
        yield learner, pushed


def test_a_push_that_waits_for_room_hears_that_the_run_has_finished(waiting: Any) -> None:
    learner, pushed = waiting
    learner.finish("done")
    with pytest.raises(RunFinished, match="done"):
        pushed.result(SOON_S)


def test_a_push_that_waits_for_room_hears_that_its_lease_has_expired(waiting: Any) -> None:
    learner, pushed = waiting
    assert pushed.result(2.0 + SOON_S) is PushOutcome.DUPLICATE
    assert learner.state().counts.events["expired"] == 2


def test_a_push_that_waits_for_room_hears_of_another_incarnation(waiting: Any, make: Any) -> None:
    learner, pushed = waiting
    learner.open_run(rules=make.rules(run="another"), version=0, frontier=Frontier())
    assert pushed.result(SOON_S) is PushOutcome.ABANDONED


def test_groups_that_were_taken_have_their_outcome_when_the_others_find_no_room(make: Any) -> None:
    broker = LocalBroker(BrokerConfig(push_timeout_s=0.2))
    leases = open_small(broker, make)

    async def deliver() -> list[Any]:
        threads = [BrokerThread(lambda: broker.client(), name) for name in ("pushes", "releases")]
        deliveries = Deliveries(*threads)
        groups = [make.group(one) for one in leases]
        found = await asyncio.gather(*map(deliveries.push, groups), return_exceptions=True)
        deliveries.close()
        threads[1].close()
        return found

    found = asyncio.run(deliver())
    assert found[0] is PushOutcome.ACCEPTED
    assert [type(one) for one in found[1:]] == [BufferFull, BufferFull]


def test_a_release_does_not_wait_for_a_push_that_waits(make: Any) -> None:
    broker = LocalBroker(BrokerConfig(push_timeout_s=LONG_S))
    one, two, three = open_small(broker, make)
    broker.push(make.group(one))

    async def deliver() -> float:
        threads = [BrokerThread(lambda: broker.client(), name) for name in ("pushes", "releases")]
        deliveries = Deliveries(*threads)
        push = asyncio.create_task(deliveries.push(make.group(two)))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await deliveries.release(lease_id=three.lease_id, error="")
        took = time.monotonic() - start
        broker.finish("over")
        with pytest.raises(RunFinished):
            await push
        deliveries.close()
        threads[1].close()
        return took

    assert asyncio.run(deliver()) < 1.0
    assert broker.state().counts.events["released"] == 1


def test_a_field_of_another_type_is_a_refusal_of_its_group(hub: Any, make: Any) -> None:
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(1)))
    (one,) = lease(broker)
    for changes in ({"reward": None}, {"token_ids": [1, 2]}, {"version_runs": None}, {"reward_parts": {"a": "b"}}):
        broken = replace(make.completion(), **changes)
        with pytest.raises(Refused, match="item 0, completion 0"):
            broker.push(make.group(one, completions=(broken,)))


def test_who_asks_for_no_prompts_is_refused_and_holds_up_nobody(hub: Any, make: Any) -> None:
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    for count in (0, -1):
        with pytest.raises(Refused, match=f"a lease of {count} prompts"):
            lease(broker, count)


def test_errors_that_cannot_be_printed_are_kept_escaped_and_bounded(hub: Any, make: Any) -> None:
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(max_attempts=1), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(1)))
    (one,) = lease(broker)
    broker.release(lease_id=one.lease_id, error="bad \udc00\x1b[31m" + "x" * 10_000)
    (dead,) = broker.dead_items()
    assert dead.error.startswith("bad \\udc00\\x1b[31mxxx") and dead.error.isprintable() and len(dead.error) < 400
    broker.report(member("g", error="line\n\udc00" + "x" * 100_000))
    (seen,) = broker.state().members
    assert seen.error.startswith("line\n\\udc00xxx") and len(seen.error) < 2100


def test_many_members_are_seen_however_small_a_frame_may_be(running_zmq: Any, make: Any) -> None:
    config = BrokerConfig(max_frame_bytes=1 << 12)
    with running_zmq(config) as url:
        broker = ZmqBroker(config, url)
        broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
        for i in range(200):
            broker.report(member(f"generator-{i}", error="x" * 500))
        assert len(broker.state().members) == 200
        broker.close()


@pytest.mark.service
@pytest.mark.slow
def test_more_members_than_a_script_can_return_are_seen(redis_server: Any, make: Any) -> None:
    broker = connect(BrokerConfig(backend="redis", namespace="many"), redis_server.url)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    for i in range(9000):
        broker.report(member(f"generator-{i}"))
    assert len(broker.state().members) == 9000
    broker.close()


@pytest.mark.service
@pytest.mark.parametrize("trouble", ["a replica", "a long script"])
def test_a_redis_that_cannot_answer_now_is_waited_for(redis_server: Any, make: Any, trouble: str) -> None:
    broker = connect(BrokerConfig(backend="redis", namespace=f"trouble {trouble}"), redis_server.url)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    raw = redis.Redis.from_url(redis_server.url)
    busy = threading.Thread(target=raw.eval, args=("local n = 0 for i = 1, 3e8 do n = n + i end return n", 0))
    raw.config_set("lua-time-limit", 100)
    if trouble == "a replica":
        raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        back = threading.Timer(1.5, raw.execute_command, ["REPLICAOF", "NO", "ONE"])
        back.start()
    else:
        busy.start()
        time.sleep(0.5)
    assert broker.feed(make.prompts(range(3))) == 3
    if trouble == "a replica":
        back.join()
    else:
        busy.join()
    raw.config_set("lua-time-limit", 5000)
    broker.close()


def test_a_waiting_call_is_made_again_as_soon_as_the_broker_is_back(running_zmq: Any, make: Any) -> None:
    """After a long wait the pause between two questions is 5 s; a new connection is a reason to ask at once."""
    config = BrokerConfig(reconnect_timeout_s=LONG_S)
    with ThreadPoolExecutor(1) as pool:
        with running_zmq(config) as url:
            learner, generator = ZmqBroker(config, url), ZmqBroker(config, url)
            learner.open_run(rules=make.rules(), version=0, frontier=Frontier())
            waiting = pool.submit(
                generator.lease, member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=LONG_S
            )
            time.sleep(7.5)  # asked at 0, 1, 3 and 7 s: the next time would be at 12
        again = config.model_copy(update={"port": int(url.rpartition(":")[2])})
        with running_zmq(again) as url:
            learner.open_run(rules=make.rules(), version=0, frontier=Frontier())
            learner.feed(make.prompts(range(1)))
            start = time.monotonic()
            assert len(waiting.result(LONG_S)) == 1
            assert time.monotonic() - start < 1.5
            learner.close()
            generator.close()


def test_waits_that_were_given_up_are_forgotten_and_a_wait_ends_within_the_hour() -> None:
    server = BrokerServer(BrokerConfig())
    call = LeasePrompts(member_id="g", policy_version=0, incarnation=0, max_prompts=1, token="t")
    for number in range(3 * SWEEP_AT):
        head = encode(RequestHead(request_id=number, call="LeasePrompts", wait_s=1e9))
        server._take(b"one", [head, encode(call)], "")
    assert len(server._deadlines) <= SWEEP_AT + 3
    assert max(server._deadlines)[0] <= time.monotonic() + 3600.0
    server.close()
