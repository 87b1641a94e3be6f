"""The Redis backend beyond the contract: the server we start, outages, and what lies in its keys."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.config import BrokerConfig
from broker.errors import BrokerError, BrokerUnreachable, NoOpenRun, Refused
from broker.messages import Frontier
from broker.redis_backend import LONGEST_WAIT_S, SOCKET_TIMEOUT_S, RedisBroker
from broker.redis_server import RedisServer
from broker.serve import serve

pytestmark = pytest.mark.service

LONG_S = 20.0


@pytest.fixture
def config(request: pytest.FixtureRequest) -> BrokerConfig:
    return BrokerConfig(backend="redis", namespace=request.node.name, reconnect_timeout_s=10.0)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own, which it may break."""
    server = RedisServer(BrokerConfig(backend="redis"))
    yield server
    server.stop()


def opened(config: BrokerConfig, url: str, make: Any, prompts: int = 4) -> RedisBroker:
    broker = RedisBroker(config, url)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(prompts)))
    return broker


def lease(broker: RedisBroker, n: int = 1, wait_s: float = 0.0) -> Any:
    return broker.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=n, wait_s=wait_s)


def test_the_script_is_loaded_again_after_a_flush_of_scripts(
    config: BrokerConfig, redis_server: RedisServer, make: Any
) -> None:
    broker = opened(config, redis_server.url, make)
    redis.Redis.from_url(redis_server.url).script_flush()
    assert broker.state().counts.queued == 4
    broker.close()


def test_c48_a_server_that_comes_back_empty_is_told_apart_from_one_that_is_gone(
    config: BrokerConfig, server: RedisServer, make: Any
) -> None:
    """A waiting generator rides out the restart; the learner is told, opens the run again and feeds it."""
    broker, generator = opened(config, server.url, make, prompts=0), RedisBroker(config, server.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, generator, wait_s=LONG_S)
        broker.state()
        server.stop()
        again = RedisServer(BrokerConfig(backend="redis", port=server.port), password=server.password)
        with pytest.raises(NoOpenRun):
            broker.take_batch(version=0, wait_s=LONG_S)
        broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
        broker.feed(make.prompts(range(2)))
        assert waiting.result(LONG_S)[0].prompt.item == "0"
    assert broker.state().counts.balanced()
    broker.close()
    generator.close()
    again.stop()


def test_a_server_that_stays_away_is_unreachable_and_the_error_names_the_setting_not_the_password(
    server: RedisServer, make: Any
) -> None:
    broker = opened(BrokerConfig(backend="redis", reconnect_timeout_s=0.5), server.url, make)
    server.stop()
    with pytest.raises(BrokerUnreachable, match=r"broker\.reconnect_timeout_s = 0\.5") as caught:
        broker.take_batch(version=0, wait_s=600.0)
    assert server.password not in str(caught.value)
    broker.close()


def test_c46_an_idle_wait_longer_than_one_block_stays_alive_and_the_next_item_is_delivered(
    config: BrokerConfig, redis_server: RedisServer, make: Any
) -> None:
    assert LONGEST_WAIT_S < SOCKET_TIMEOUT_S
    broker, generator = opened(config, redis_server.url, make, prompts=0), RedisBroker(config, redis_server.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, generator, wait_s=LONG_S)
        assert broker.take_batch(version=0, wait_s=LONGEST_WAIT_S + 0.5) is None
        broker.feed(make.prompts([0]))
        assert waiting.result(LONG_S)[0].prompt.item == "0"
    broker.close()
    generator.close()


def test_a_broken_subscription_costs_one_block_and_not_the_wait(
    config: BrokerConfig, redis_server: RedisServer, make: Any
) -> None:
    broker, generator = opened(config, redis_server.url, make, prompts=0), RedisBroker(config, redis_server.url)
    raw = redis.Redis.from_url(redis_server.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, generator, wait_s=LONG_S)
        broker.take_batch(version=0, wait_s=0.3)
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        broker.feed(make.prompts([0]))
        start = time.monotonic()
        assert len(waiting.result(LONG_S)) == 1
        assert time.monotonic() - start < LONGEST_WAIT_S + 1.0
    broker.close()
    generator.close()


def test_a_lease_call_sent_again_after_a_broken_connection_leases_once(
    config: BrokerConfig, redis_server: RedisServer, make: Any
) -> None:
    broker = opened(config, redis_server.url, make)
    again = RedisBroker(config, redis_server.url, token=lambda: "the same call")
    assert [one.lease_id for one in lease(again, 2)] == [one.lease_id for one in lease(again, 2)]
    assert broker.state().counts.leased == 2
    assert len(lease(broker, 2)) == 2
    broker.close()
    again.close()


def test_c120_a_pickle_bomb_among_the_groups_is_counted_replaced_and_never_run(
    config: BrokerConfig, redis_server: RedisServer, make: Any, tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    broker = opened(config, redis_server.url, make)
    for one in lease(broker, 2):
        broker.push(make.group(one))
    raw = redis.Redis.from_url(redis_server.url)
    raw.hset(f"{{{config.namespace}}}:groups", "0", pickle.dumps(Bomb()))
    assert broker.take_batch(version=0, wait_s=0) is None
    counts = broker.state().counts
    assert (counts.queued, counts.buffered, counts.training, counts.events) == (3, 1, 0, {"malformed": 1})
    (again,) = lease(broker)
    assert (again.prompt.item, again.attempt) == ("0", 2)
    broker.push(make.group(again))
    batch = broker.take_batch(version=0, wait_s=0)
    assert batch is not None and {group.prompt.item for group in batch.groups} == {"0", "1"}
    assert not (tmp_path / "exploded").exists()
    broker.close()


def test_a_group_over_the_frame_limit_is_refused_before_it_is_sent(redis_server: RedisServer, make: Any) -> None:
    config = BrokerConfig(backend="redis", namespace="oversized", max_frame_bytes=4096)
    broker = opened(config, redis_server.url, make)
    with pytest.raises(Refused, match=r"broker\.max_frame_bytes = 4096"):
        broker.push(make.group(lease(broker)[0], ((0, 5000),)))
    broker.close()


def test_a_server_that_may_evict_is_not_used(server: RedisServer) -> None:
    redis.Redis.from_url(server.url).config_set("maxmemory", "100mb")
    redis.Redis.from_url(server.url).config_set("maxmemory-policy", "allkeys-lru")
    broker = RedisBroker(BrokerConfig(backend="redis"), server.url)
    with pytest.raises(BrokerError, match="noeviction"):
        broker.state()
    broker.close()


def test_c122_our_server_wants_a_password_that_no_process_list_and_no_other_user_sees(server: RedisServer) -> None:
    arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    environment = Path(f"/proc/{server.pid}/environ").read_bytes().decode()
    assert server.password not in arguments + environment
    assert len(server.password) >= 24
    assert stat.S_IMODE(server.config_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.config_file.parent.stat().st_mode) == 0o700
    for password in ("", ":wrong@"):
        broker = RedisBroker(BrokerConfig(backend="redis"), f"redis://{password}127.0.0.1:{server.port}/0")
        with pytest.raises(BrokerError, match=r"broker\.url"):
            broker.state()
        broker.close()
    settings = redis.Redis.from_url(server.url).config_get("*")
    assert (settings["bind"], settings["maxmemory-policy"]) == ("127.0.0.1", "noeviction")


def test_c113_a_busy_port_names_the_setting(server: RedisServer) -> None:
    with pytest.raises(BrokerError, match=rf"port {server.port} .* set broker\.port"):
        RedisServer(BrokerConfig(backend="redis", port=server.port))


@pytest.mark.parametrize("port", [0, 6399])
@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("nobody.invalid", r"broker\.host = 'nobody\.invalid' does not resolve"),
        ("192.0.2.1", r"cannot bind broker\.host = '192\.0\.2\.1', broker\.port = {port}: Cannot assign"),
    ],
)
def test_a_host_that_is_not_ours_is_named_with_its_setting(host: str, told: str, port: int) -> None:
    with pytest.raises(BrokerError, match=told.format(port=port)):
        RedisServer(BrokerConfig(backend="redis", host=host, port=port))


def test_stopping_removes_the_process_and_its_files() -> None:
    server = RedisServer(BrokerConfig(backend="redis"))
    server.stop()
    server.stop()
    assert not server.config_file.parent.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_c59_the_server_dies_with_its_parent_even_by_sigkill() -> None:
    program = (
        "import sys; from broker.config import BrokerConfig; from broker.redis_server import RedisServer\n"
        "server = RedisServer(BrokerConfig(backend='redis')); print(server.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(LONG_S)
    assert select.select([child], [], [], LONG_S)[0], "the server outlived its parent"
    os.close(child)
    parent.stdin.close()
    parent.stdout.close()


def test_serve_runs_a_redis_until_it_is_stopped(make: Any) -> None:
    stop, urls = threading.Event(), list[str]()
    config = BrokerConfig(backend="redis")

    def ready(url: str) -> None:
        urls.append(url)
        broker = opened(config, url, make)
        assert broker.state().counts.queued == 4
        broker.close()
        stop.set()

    serve(config, ready=ready, stop=stop)
    with pytest.raises(redis.exceptions.ConnectionError):
        redis.Redis.from_url(urls[0]).ping()


def test_serve_ends_with_an_error_when_its_redis_dies() -> None:
    def ready(url: str) -> None:
        redis.Redis.from_url(url).shutdown(nosave=True)

    with pytest.raises(BrokerError, match="has ended by itself"):
        serve(BrokerConfig(backend="redis"), ready=ready, stop=threading.Event())
