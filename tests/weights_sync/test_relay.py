"""Versions through a real broker, ZeroMQ's and Redis: receivers that reach nothing else, and what the broker loses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from broker.config import BrokerConfig
from broker.connect import Access
from broker.contract import Broker
from broker.messages import Frontier
from broker.redis_server import RedisServer
from broker.server import BrokerServer
from tests.weights_sync.conftest import RULES, Follower, ProcessReceiver, ThreadReceiver
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import LayoutRefused
from weights_sync.publisher import Publisher
from weights_sync.relay import Relay
from weights_sync.staging import declare

SYNC = WeightsSyncConfig(transport="relay", sync_timeout_s=10.0, bucket_bytes=2048)


@dataclass(frozen=True)
class Served:
    """A broker in a thread or a process of its own, with an open run at incarnation 0."""

    access: Access

    def client(self) -> Broker:
        return self.access()

    def arguments(self) -> tuple[str, str]:
        return self.access.config.model_dump_json(), self.access.url


@pytest.fixture(params=["zmq", pytest.param("redis", marks=pytest.mark.service)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    config = BrokerConfig(backend=request.param, namespace=request.node.nodeid, reconnect_timeout_s=10.0)
    with ExitStack() as stack:
        if request.param == "zmq":
            server, stop = BrokerServer(config), threading.Event()
            thread = threading.Thread(target=server.run, args=(stop,))
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(stop.set)
        else:
            server = RedisServer(config)
            stack.callback(server.stop)
        served = Served(Access(config=config, url=server.url))
        client = served.client()
        client.open_run(rules=RULES, version=0, frontier=Frontier())
        stack.callback(client.close)
        yield served


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))


@pytest.fixture
def publish(served: Served, model: nn.Module) -> Iterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def start(access: Access = served.access, config: WeightsSyncConfig = SYNC) -> Publisher:
        started.append(Publisher(config=config, connect=access, declaration=declare(model), incarnation=0))
        return started[-1]

    yield start
    for publisher in started:
        publisher.close()


@pytest.fixture
def follow(served: Served) -> Iterator[Callable[..., ThreadReceiver]]:
    followers: list[Follower] = []

    def start(member_id: str) -> ThreadReceiver:
        receiver = ThreadReceiver(SYNC, member_id, lambda manifest: None, served.access)
        followers.append(Follower(served, member_id, receiver.take, pid=os.getpid()))
        return receiver

    yield start
    for follower in followers:
        follower.leave()


@pytest.fixture
def spawn(served: Served) -> Iterator[Callable[..., ProcessReceiver]]:
    started: list[ProcessReceiver] = []
    followers: list[Follower] = []

    def start(member_id: str, die_at: int = 0) -> ProcessReceiver:
        started.append(ProcessReceiver(SYNC, member_id, die_at, served.arguments()))
        followers.append(Follower(served, member_id, started[-1].take, pid=started[-1].process.pid))
        return started[-1]

    yield start
    for receiver, follower in zip(started, followers, strict=True):
        follower._stop.set()
        if receiver.process.poll() is None:
            follower.stop()
        receiver.process.kill()
        receiver.process.wait(timeout=10)


def uses(publisher: Publisher, member_id: str, version: int) -> bool:
    with publisher._changed:
        return publisher._changed.wait_for(
            lambda: any(m.member_id == member_id and m.policy_version == version for m in publisher._members),
            timeout=20,
        )


def change(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, :3] += 1


def test_versions_whole_and_as_updates_reach_receivers_by_the_broker_alone(
    served, model, publish, follow, spawn
) -> None:
    receiver, _ = follow("g1"), spawn("g2")
    publisher = publish()
    assert publisher._carrier.address == "relay:run/0", "no address of the learner's store"
    for version in range(3):
        change(model)
        publisher.offer(version, model.named_parameters())
        publisher.flush(20)
        assert uses(publisher, "g2", version)
        assert torch.equal(receiver.versions[version]["0.weight"], model[0].weight)
    assert publisher.stats.failed_attempts == 0 and publisher.stats.wire_bytes < publisher.stats.payload_bytes / 10
    publisher.close()
    assert served.client().sweep_blobs([]) == 0, "nothing is left in the broker"


def test_a_receiver_killed_in_the_middle_does_not_keep_the_other_from_the_version(model, publish, spawn) -> None:
    spawn("g1")
    doomed = spawn("g2", die_at=2)
    publisher = publish()
    publisher.offer(0, model.named_parameters())
    assert doomed.process.wait(timeout=20) == -9
    assert uses(publisher, "g1", 0)


def test_a_broker_that_lost_its_blobs_fails_the_attempt_and_the_version_is_sent_again(
    served, model, publish, follow, monkeypatch
) -> None:
    read, lost = Relay.read, []

    def forgetful(relay: Relay, name: str) -> bytes:
        if name.endswith("/0.1") and not lost:
            lost.append(served.client().sweep_blobs([]))
        return read(relay, name)

    monkeypatch.setattr(Relay, "read", forgetful)
    receiver = follow("g1")
    publisher = publish()
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    assert lost == [4] and publisher.stats.failed_attempts == 1
    assert torch.equal(receiver.versions[0]["0.weight"], model[0].weight)


def test_a_version_that_can_never_lie_in_the_broker_is_refused_before_training(served, publish) -> None:
    access = Access(config=served.access.config.model_copy(update={"max_blob_bytes": 4096}), url=served.access.url)
    with pytest.raises(LayoutRefused, match=r"takes \d+ bytes, more than broker\.max_blob_bytes = 4096"):
        publish(access)
    assert served.client().sweep_blobs([]) == 0
