"""What a broker with ``durability: disk`` still knows after its death, and which folders it will not touch."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.codec import encode
from broker.config import BrokerConfig
from broker.connect import connect
from broker.contract import Broker
from broker.errors import BrokerError, NoOpenRun
from broker.folder import IN_USE
from broker.messages import SCHEMA_VERSION, Frontier, Member, MemberState, Publication
from broker.serve import serve
from broker.server import BrokerServer
from broker.store import FILE, Store

START_S = 20.0
PROGRAM = """
import sys, threading
from broker.config import BrokerConfig
from broker.serve import serve
config = BrokerConfig.model_validate_json(sys.argv[1])
serve(config, ready=lambda url: print(url, flush=True), stop=threading.Event())
"""


class Killable:
    """A broker in a process of its own that comes back at its old address."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", PROGRAM, self.config.model_dump_json()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        port = int(self.url.removesuffix("/0").rpartition(":")[2])
        self.config = self.config.model_copy(update={"port": port})

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(START_S)

    def client(self) -> Broker:
        return connect(self.config, self.url)


@pytest.fixture(params=["zmq", pytest.param("redis", marks=pytest.mark.service)])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Killable]:
    config = BrokerConfig(
        backend=request.param, durability="disk", data_dir=str(tmp_path / "data"), reconnect_timeout_s=START_S
    )
    broker = Killable(config)
    yield broker
    broker.kill()


def lease(client: Broker, n: int, version: int = 0) -> Any:
    return client.lease(member_id="g", policy_version=version, incarnation=0, max_prompts=n, wait_s=0)


def test_every_state_survives_sigkill_and_leases_can_still_be_answered(broker: Killable, make: Any) -> None:
    client = broker.client()
    client.open_run(rules=make.rules(max_attempts=1, max_staleness=3), version=0, frontier=Frontier())
    client.feed(make.prompts(range(12)))
    first = lease(client, 2)
    for one in first:
        client.push(make.group(one))
    taken = client.take_batch(version=0, wait_s=0)
    assert taken is not None
    client.trained(batch_id=taken.batch_id, version=1)
    client.durable(version=1)
    leased = lease(client, 6, 1)
    client.release(lease_id=leased[5].lease_id, error="broke")
    for one in leased[:4]:
        client.push(make.group(one, ((1, 4),)))
    out = client.take_batch(version=1, wait_s=0)
    assert out is not None
    client.feed(make.prompts(range(2), eval_version=1))
    offer = Publication(version=1, incarnation=0, attempt=1, epoch=1, store="h:1", receivers=("g",))
    client.publish(offer)
    before = client.state().counts
    assert (before.queued, before.leased, before.buffered, before.training, before.durable) == (4, 1, 2, 2, 2)

    broker.kill()
    broker.start()

    counts = client.state().counts
    assert {**vars(counts), "events": None} == {**vars(before), "events": None}
    assert client.publication(after_attempt=0, wait_s=0) == offer
    assert [one.item for one in client.dead_items()] == [leased[5].prompt.item]
    again = client.take_batch(version=1, wait_s=0)
    assert again is not None and encode(again) == encode(out)
    client.push(make.group(leased[4], ((1, 4),)))
    client.trained(batch_id=again.batch_id, version=2)
    assert client.feed(make.prompts(range(12))) == 0, "everything is known"
    evaluation = lease(client, 2, 1)
    assert [one.prompt.item for one in evaluation] == ["eval1.0", "eval1.1"]
    counts = client.state().counts
    assert counts.balanced()
    assert (counts.trained, counts.buffered, counts.leased) == (2, 3, 0)
    client.close()


def test_a_call_on_its_way_when_the_broker_dies_is_answered_by_the_one_that_comes_back(
    broker: Killable, make: Any
) -> None:
    client = broker.client()
    client.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.kill()
    broker.start()
    assert client.feed(make.prompts(range(3))) == 3
    client.close()


def test_leases_have_their_whole_time_again_and_members_say_themselves_that_they_live(
    tmp_path: Path, make: Any
) -> None:
    clock, config = [100.0], BrokerConfig()
    first = BrokerServer(config, clock=lambda: clock[0], store=Store(tmp_path))
    ledger = first.ledger
    ledger.open_run(rules=make.rules(lease_timeout_s=5.0), version=0, frontier=Frontier(), token="t")
    ledger.feed(["0"], [encode(make.prompt(0))])
    ledger.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, now=100.0, token="u")
    member = Member(
        member_id="g", role="generator", state=MemberState.SERVING, policy_version=0, incarnation=0, host="h", pid=1
    )
    ledger.report(member, 100.0)
    revision = ledger.revision
    first._flush()
    first.close()
    clock[0] = 3.0  # a monotonic clock starts anew with its machine
    second = BrokerServer(config, clock=lambda: clock[0], store=Store(tmp_path))
    second.ledger.expire(7.9)
    assert (second.ledger.items.counts().leased, second.ledger.roster.members) == (1, {})
    assert second.ledger.revision > revision, "who waits for news looks again"
    second.ledger.expire(8.0)
    assert (second.ledger.items.counts().leased, second.ledger.items.counts().queued) == (0, 1)
    second.close()


def test_a_folder_in_use_foreign_or_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    def start(folder: Path) -> BrokerServer:
        return BrokerServer(BrokerConfig(), store=Store(folder))

    running = start(tmp_path / "used")
    with pytest.raises(BrokerError, match=rf"used.*broker\.data_dir.*{IN_USE}"):
        start(tmp_path / "used")
    running.close()
    start(tmp_path / "used").close()

    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / FILE).write_text("shopping list " * 100)
    with pytest.raises(BrokerError, match=r"broker\.data_dir.*not a database"):
        start(tmp_path / "foreign")

    with sqlite3.connect(tmp_path / "used" / FILE) as file:
        file.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    file.close()
    with pytest.raises(BrokerError, match=f"schema {SCHEMA_VERSION + 1}"):
        start(tmp_path / "used")

    (tmp_path / "a file").write_text("")
    with pytest.raises(BrokerError, match=r"broker\.data_dir"):
        start(tmp_path / "a file")


@pytest.mark.parametrize("backend", ["zmq", pytest.param("redis", marks=pytest.mark.service)])
def test_durability_without_a_folder_names_the_setting(backend: Any) -> None:
    with pytest.raises(BrokerError, match=r"broker\.data_dir"):
        serve(BrokerConfig(backend=backend, durability="disk"), ready=lambda url: None, stop=threading.Event())


def test_a_broker_that_cannot_write_any_more_ends_instead_of_answering(tmp_path: Path, make: Any) -> None:
    """What it would have said has not happened: the client goes on asking until a broker with a disk is back."""
    server = BrokerServer(BrokerConfig(), store=Store(tmp_path))
    failure: list[BaseException] = []

    def serve_until_it_fails() -> None:
        try:
            server.run(threading.Event())
        except BrokerError as error:
            failure.append(error)

    thread = threading.Thread(target=serve_until_it_fails)
    thread.start()
    assert server._store is not None
    server._store._sqlite.execute("PRAGMA max_page_count=1")  # what a full disk says: "database or disk is full"
    client = connect(BrokerConfig(reconnect_timeout_s=1.0), server.url)
    with pytest.raises(BrokerError):
        client.open_run(rules=make.rules(), version=0, frontier=Frontier())
        client.feed([make.prompt(i) for i in range(200)])
    thread.join(START_S)
    assert failure and "broker.data_dir" in str(failure[0])
    client.close()


def test_without_durability_a_broker_that_comes_back_knows_no_run(tmp_path: Path, make: Any) -> None:
    broker = Killable(BrokerConfig(reconnect_timeout_s=START_S))
    client = broker.client()
    client.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.kill()
    broker.start()
    with pytest.raises(NoOpenRun):
        client.feed(make.prompts(range(2)))
    broker.kill()
    client.close()


@pytest.mark.service
def test_the_password_of_a_redis_with_a_folder_is_kept_where_only_its_owner_reads_it(tmp_path: Path) -> None:
    from broker.redis_server import PASSWORD_FILE, RedisServer

    config = BrokerConfig(backend="redis")
    passwords = set()
    for _ in range(2):
        server = RedisServer(config, data_dir=tmp_path)
        passwords.add(server.password)
        server.stop()
    assert len(passwords) == 1
    assert (tmp_path / PASSWORD_FILE).stat().st_mode & 0o077 == 0
    assert time.time() - (tmp_path / "appendonly.aof").stat().st_mtime < 3600


@pytest.mark.service
def test_a_redis_folder_has_one_broker_at_a_time_also_when_the_first_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    config = BrokerConfig(backend="redis", durability="disk", data_dir=str(folder))
    first = Killable(config)
    with monkeypatch.context() as soon:
        soon.setattr("broker.folder.PATIENCE_S", 0.2)
        with pytest.raises(BrokerError, match=rf"{folder}.*broker\.data_dir.*{IN_USE}"):
            serve(config, ready=lambda url: None, stop=threading.Event())
    assert first.client().state().counts.balanced()
    first.kill()
    first.start()
    assert first.client().state().counts.balanced()
    first.kill()


@pytest.mark.parametrize("backend", ["zmq", pytest.param("redis", marks=pytest.mark.service)])
def test_what_the_broker_keeps_is_for_its_owner_alone(backend: Any, tmp_path: Path, make: Any) -> None:
    for folder in (tmp_path / "made", tmp_path / "there"):
        if folder.name == "there":
            folder.mkdir(mode=0o755)
        broker = Killable(BrokerConfig(backend=backend, durability="disk", data_dir=str(folder)))
        client = broker.client()
        client.open_run(rules=make.rules(), version=0, frontier=Frontier())
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) >= 3 - (backend == "zmq" and 1)
        assert [path for path in files if path.stat().st_mode & 0o077] == []
        client.close()
        broker.kill()
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o755


@pytest.mark.service
@pytest.mark.parametrize("name", ["with a space", 'a "quote" and \\', "it's # ünï", "new\nline"])
def test_a_redis_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    from broker.redis_server import RedisServer

    server = RedisServer(BrokerConfig(backend="redis"), data_dir=tmp_path / name)
    server.stop()
    assert (tmp_path / name / "appendonly.aof").exists()


@pytest.mark.service
def test_a_redis_that_ends_by_itself_is_told_with_its_folder_and_its_last_words(tmp_path: Path) -> None:
    def kill(url: str) -> None:
        redis.Redis.from_url(url).shutdown(nosave=True)

    config = BrokerConfig(backend="redis", durability="disk", data_dir=str(tmp_path))
    with pytest.raises(BrokerError, match=rf"broker\.data_dir = {tmp_path}(.|\n)*bye bye") as caught:
        serve(config, ready=kill, stop=threading.Event())
    assert (tmp_path / "redis.password").read_text() not in str(caught.value)
