"""What the broker's tests share: messages made to order, and the three backends behind one fixture."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
import redis

from broker.config import BrokerConfig
from broker.connect import connect
from broker.contract import Broker
from broker.local import LocalBroker
from broker.messages import Completion, Group, Lease, Prompt, Rules, Split
from broker.redis_connection import acl_rule
from broker.redis_server import RedisServer
from broker.server import BrokerServer
from tests.broker.folders import in_memory


@dataclass(frozen=True)
class Make:
    """Messages made to order."""

    def rules(self, **changes: object) -> Rules:
        defaults: dict[str, object] = {
            "max_staleness": 1,
            "on_stale": "mask",
            "groups_per_step": 2,
            "max_attempts": 3,
            "lease_timeout_s": 60.0,
            "member_timeout_s": 60.0,
        }
        return Rules(**(defaults | changes))  # type: ignore[arg-type]

    def prompt(self, position: int, *, eval_version: int | None = None) -> Prompt:
        evaluation = eval_version is not None
        return Prompt(
            item=f"eval{eval_version}.{position}" if evaluation else str(position),
            position=position,
            epoch=0,
            split=Split.EVAL if evaluation else Split.TRAIN,
            token_ids=np.arange(3, dtype=np.int32),
            text="1+1=",
            reference="2",
            n=2,
            temperature=1.0,
            max_tokens=8,
            seed=position,
        )

    def prompts(self, positions: Sequence[int], *, eval_version: int | None = None) -> list[Prompt]:
        return [self.prompt(position, eval_version=eval_version) for position in positions]

    def completion(self, runs: Sequence[tuple[int, int]] = ((0, 4),)) -> Completion:
        """``runs``: (policy version, tokens)."""
        length = sum(count for _, count in runs)
        return Completion(
            token_ids=np.arange(length, dtype=np.int32),
            behavior_logprobs=np.full(length, -0.5, dtype=np.float32),
            loss_mask=np.ones(length, dtype=np.uint8),
            version_runs=np.array(runs, dtype=np.int32).reshape(-1, 2),
            finish_reason="stop",
            reward=1.0,
            reward_parts={"right": 1.0},
            text="2",
        )

    def group(self, lease: Lease, runs: Sequence[tuple[int, int]] = ((0, 4),), **changes: object) -> Group:
        fields: dict[str, object] = {
            "lease_id": lease.lease_id,
            "prompt": lease.prompt,
            "generator": "g",
            "incarnation": lease.incarnation,
            "completions": (self.completion(runs), self.completion(runs)),
            "failed_completions": 0,
            "generation_s": 0.1,
        }
        return Group(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Hub:
    """One running broker of some backend: new clients for it, closed with the test."""

    backend: str
    new: Callable[[], Broker]
    clients: list[Broker] = field(default_factory=list)

    def client(self) -> Broker:
        self.clients.append(self.new())
        return self.clients[-1]


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One real server for all tests; each test has a namespace of its own. A missing binary is a failure."""
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:  # the tests of its reloads dump thousands of times
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", folder)
            server = RedisServer(BrokerConfig(backend="redis"))
        yield server
        server.stop()


def limited_user(server: RedisServer, namespace: str, name: str = "run") -> str:
    """The url of a user who may do what broker/redis_connection.py says is needed, and nothing else."""
    raw = redis.Redis.from_url(server.url)
    raw.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *acl_rule(namespace).split(" "))
    raw.close()
    return server.url.replace(f":{server.password}@", f"{name}:secret@")


@pytest.fixture(params=["local", "zmq", pytest.param("redis", marks=pytest.mark.service)])
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    """A fresh broker; afterwards its books must add up, whatever the test did."""
    backend = request.param
    config = BrokerConfig(reconnect_timeout_s=10.0, namespace=request.node.nodeid)
    with ExitStack() as stack:
        if backend == "local":
            first = LocalBroker()
            hub = Hub(backend, first.client)
        elif backend == "zmq":
            url = stack.enter_context(zmq_server(config))
            hub = Hub(backend, lambda: connect(config, url))
        else:
            server: RedisServer = request.getfixturevalue("redis_server")
            limited = limited_user(server, config.namespace)  # as somebody's own Redis would have it
            hub = Hub(backend, lambda: connect(config, limited))
        yield hub
        counts = hub.client().state().counts
        for client in hub.clients:
            client.close()
        assert counts.balanced(), counts


class zmq_server:
    """A ZeroMQ server in a thread of its own."""

    def __init__(self, config: BrokerConfig) -> None:
        self.server = BrokerServer(config)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.server.run, args=(self.stop,))

    def __enter__(self) -> str:
        self.thread.start()
        return self.server.url

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running_zmq() -> type[zmq_server]:
    return zmq_server
