"""Peers that mean harm or know no better: numbers, names and bodies that no run has end nothing and change nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker import calls
from broker.calls import Call
from broker.client import ZmqBroker
from broker.codec import decode, encode
from broker.config import BrokerConfig
from broker.contract import Broker, PushOutcome
from broker.errors import BrokerError, Refused
from broker.heads import GroupHead
from broker.messages import Frontier, Lease
from broker.server import BrokerServer
from broker.store import Store
from broker.wire import ReplyHead, RequestHead

LONG_S = 20.0


def lease(broker: Broker, n: int) -> tuple[Lease, ...]:
    return broker.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=n, wait_s=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": 2**53 - 1},
        {"version": 2**63},
        {"frontier": Frontier(base=-1)},
        {"frontier": Frontier(base=2**53)},
        {"frontier": Frontier(base=2**64 - 1)},
        {"frontier": Frontier(base=5, beyond=(-4,))},
        {"frontier": Frontier(base=5, beyond=(7, 2**52))},
        {"after": 2**53},
    ],
    ids=range(9),
)
def test_a_run_at_a_place_that_no_run_has_is_refused(hub: Any, make: Any, changes: dict[str, Any]) -> None:
    broker: Broker = hub.client()
    with pytest.raises(Refused):
        broker.open_run(**({"rules": make.rules(), "version": 0, "frontier": Frontier()} | changes))
    assert broker.state().incarnation == -1
    assert broker.open_run(rules=make.rules(), version=0, frontier=Frontier()) == 0
    assert broker.feed(make.prompts(range(2))) == 2
    assert len(lease(broker, 2)) == 2


@pytest.mark.parametrize("token", ["", "x\udc00", "\n", "é", "x" * 65])
def test_a_token_that_cannot_be_a_part_of_names_is_refused(hub: Any, make: Any, token: str) -> None:
    broker = hub.client()
    broker._token = lambda: token
    with pytest.raises(Refused, match="token"):
        broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    assert broker.state().incarnation == -1


@pytest.mark.parametrize("item", ["٣", "-1", "01", "1" * 16, "eval٣.0", "eval1.٣"])  # Arabic digits are digits to some
def test_an_item_that_is_no_number_of_ascii_is_refused(hub: Any, make: Any, item: str) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    with pytest.raises(Refused, match="not named by its position"):
        broker._call(calls.Feed(items=(item,)), bodies=[b""])
    assert broker.state().counts.fed == 0


def test_bodies_that_are_missing_or_too_many_change_nothing(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    with pytest.raises(Refused):
        broker._call(calls.Feed(items=("0", "1")), bodies=[b""])
    broker.feed(make.prompts(range(2)))
    heads = tuple(GroupHead.of(make.group(one)) for one in lease(broker, 2))
    for bodies in ([b""], [b""] * 3):
        with pytest.raises(Refused):
            broker._call(calls.Push(heads=heads), bodies=bodies)
    counts = broker.state().counts
    assert (counts.fed, counts.leased, counts.buffered) == (2, 2, 0)


def test_a_group_of_another_item_than_its_head_says_is_not_trained(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(2)))
    one, two = lease(broker, 2)
    heads = tuple(GroupHead.of(make.group(each)) for each in (one, two))
    bodies = [encode(make.group(one, prompt=two.prompt)), encode(make.group(two))]
    assert broker._call(calls.Push(heads=heads), bodies=bodies) == (PushOutcome.ACCEPTED,) * 2
    assert broker.take_batch(version=0, wait_s=0.0) is None
    counts = broker.state().counts
    assert (counts.queued, counts.buffered, counts.events["malformed"]) == (1, 1, 1)


def test_an_answer_of_another_round_is_left_out(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(2), eval_version=0))
    one, two = lease(broker, 2)
    other = make.prompt(1, eval_version=3)
    heads = tuple(GroupHead.of(make.group(each)) for each in (one, two))
    bodies = [encode(make.group(one)), encode(make.group(two, prompt=other))]
    broker._call(calls.Push(heads=heads), bodies=bodies)
    assert [one.prompt.item for one in broker.eval_results(version=0, count=2, wait_s=1.0)] == ["eval0.0"]


def test_no_call_leases_more_than_one_answer_can_carry(hub: Any, make: Any) -> None:
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(groups_per_step=10_000), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(600)))
    assert len(lease(broker, 100_000)) == 256
    assert broker.state().counts.leased == 256


def test_groups_in_front_of_a_refused_one_have_their_outcomes(hub: Any, make: Any) -> None:
    """Twenty go in two calls; what the first settled is told with the refusal of the second."""
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(groups_per_step=100), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(21)))
    leases = lease(broker, 21)
    groups = [make.group(one) for one in leases[:20]]
    groups[18] = make.group(leases[18], prompt=leases[20].prompt)
    with pytest.raises(Refused, match="is for item 18, not for 20") as refusal:
        broker.push_all(groups)
    assert refusal.value.settled == dict.fromkeys(range(16), PushOutcome.ACCEPTED)
    assert broker.state().counts.buffered == 16


def test_of_groups_one_of_which_is_too_large_none_is_sent(running_zmq: Any, make: Any) -> None:
    config = BrokerConfig(max_frame_bytes=1 << 16)
    with running_zmq(config) as url:
        broker = ZmqBroker(config, url)
        broker.open_run(rules=make.rules(groups_per_step=100), version=0, frontier=Frontier())
        broker.feed(make.prompts(range(20)))
        leases = lease(broker, 20)
        groups = [make.group(one) for one in leases[:19]] + [make.group(leases[19], ((0, 100_000),))]
        with pytest.raises(Refused, match=r"a group of \d+ bytes is over broker\.max_frame_bytes = 65536"):
            broker.push_all(groups)
        assert broker.state().counts.leased == 20
        broker.close()


def test_a_full_buffer_is_asked_for_room_and_not_sent_the_groups_again_and_again(
    monkeypatch: pytest.MonkeyPatch, hub: Any, make: Any
) -> None:
    learner: Broker = hub.client()
    rules = make.rules(groups_per_step=1, max_staleness=3, max_buffer_bytes=1)
    learner.open_run(rules=rules, version=0, frontier=Frontier())
    learner.feed(make.prompts(range(3)))
    leases = lease(learner, 3)
    generator = hub.client()
    sent: list[int] = []
    exchange = generator._exchange

    def counted(call: Call[Any], bodies: Any, wait_s: float) -> Any:
        sent.append(sum(map(len, bodies)))
        return exchange(call, bodies, wait_s)

    monkeypatch.setattr(generator, "_exchange", counted)
    pushed: list[Any] = []
    groups = [make.group(one) for one in leases]
    thread = threading.Thread(target=lambda: pushed.extend(generator.push_all(groups)))
    thread.start()
    while len(sent) < 6:
        time.sleep(0.01)
    assert sum(map(bool, sent)) == 1, "it asks, and sends nothing"
    for version in range(3):
        batch = learner.take_batch(version=version, wait_s=LONG_S)
        assert batch is not None
        learner.trained(batch_id=batch.batch_id, version=version + 1)
    thread.join(LONG_S)
    assert pushed == [PushOutcome.ACCEPTED] * 3
    assert sum(map(bool, sent)) == 3


def test_an_answer_that_cannot_be_said_is_an_error_of_its_call_alone(make: Any) -> None:
    server = BrokerServer(BrokerConfig())
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    broker = ZmqBroker(BrokerConfig(reconnect_timeout_s=LONG_S), server.url)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    server.ledger.revision = 2**60  # no call can bring it there
    with pytest.raises(Refused, match="cannot encode RunState"):
        broker.state()
    assert broker.feed(make.prompts(range(2))) == 2
    broker.close()
    stop.set()
    thread.join(LONG_S)


def test_a_ledger_that_cannot_be_stored_ends_with_the_setting(tmp_path: Path, make: Any) -> None:
    store = Store(tmp_path)
    server = BrokerServer(BrokerConfig(), store=store)
    server.ledger.open_run(rules=make.rules(), version=0, frontier=Frontier(), token="t")
    server.ledger.items.trained_at["\udc00"] = 0  # no call can bring it there
    with pytest.raises(BrokerError, match=r"broker\.data_dir"):
        store.commit(server.ledger)
    server.close()


def test_a_message_of_very_many_frames_is_refused_and_harms_nobody(running_zmq: Any, make: Any) -> None:
    config = BrokerConfig(reconnect_timeout_s=LONG_S)
    with running_zmq(config) as url:
        peer = zmq.Context.instance().socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(url)
        head = encode(RequestHead(request_id=1, call="Finish", wait_s=0.0))
        peer.send(head, zmq.SNDMORE)
        peer.send(encode(calls.Finish(reason="")), zmq.SNDMORE)
        for _ in range(300_000):
            peer.send(b"", zmq.SNDMORE)
        peer.send(b"")
        broker = ZmqBroker(config, url)
        assert broker.open_run(rules=make.rules(), version=0, frontier=Frontier()) == 0
        assert peer.poll(int(1000 * LONG_S))
        reply = decode(peer.recv_multipart()[0], ReplyHead, max_bytes=1 << 16)
        assert (reply.outcome, reply.text) == ("refused", "a request of more than 512 frames")
        state = broker.state()
        assert (state.finished, state.counts.events) == ("", {"malformed": 1})
        broker.close()
        peer.close()


def test_what_is_refused_is_told_in_few_words(running_zmq: Any, make: Any) -> None:
    config = BrokerConfig(reconnect_timeout_s=LONG_S)
    with running_zmq(config) as url:
        broker = ZmqBroker(config, url)
        refused: list[Callable[[], Any]] = [
            lambda: broker.open_run(rules=make.rules(run="x" * 10**6, max_attempts=0), version=0, frontier=Frontier()),
            lambda: broker.open_run(rules=make.rules(on_stale="x" * 10**6), version=0, frontier=Frontier()),
            lambda: broker._call(calls.Feed(items=("x" * 10**6,)), bodies=[b""]),
            lambda: broker._call(calls.Trained(batch_id="x" * 10**6, version=3)),
        ]
        for ask in refused:
            with pytest.raises(BrokerError) as refusal:
                ask()
            assert len(str(refusal.value)) <= 1000
        broker.close()


def test_many_version_runs_are_not_listed_in_the_refusal(make: Any, hub: Any) -> None:
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(1)))
    (one,) = lease(broker, 1)
    whole = make.completion([(i, 1) for i in range(100_000)])
    broken = replace(whole, version_runs=whole.version_runs[1:])
    with pytest.raises(Refused, match="do not cover") as refusal:
        broker.push(make.group(one, completions=(broken,)))
    assert len(str(refusal.value)) < 500
