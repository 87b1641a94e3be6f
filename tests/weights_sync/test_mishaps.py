"""Small things that go wrong once, or in one process of many: they cost an attempt, and never the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from broker.local import LocalBroker
from broker.messages import Publication
from tests.weights_sync.conftest import Follower, ThreadReceiver
from tests.weights_sync.test_parts import Learner, assert_equal
from weights_sync import groups, part_sender, vllm_plugin
from weights_sync.config import WeightsSyncConfig
from weights_sync.disk import Disk
from weights_sync.errors import LayoutRefused, NoReceiver, SyncFailed
from weights_sync.groups import host_store, join_store
from weights_sync.manifest import Manifest
from weights_sync.part_sender import Order
from weights_sync.publisher import Publisher
from weights_sync.staging import declare

LONG_S = 30.0


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))


@pytest.fixture
def learn(run: LocalBroker, model: nn.Module) -> Iterator[Callable[[WeightsSyncConfig], Learner]]:
    started: list[Learner] = []

    def start(config: WeightsSyncConfig) -> Learner:
        started.append(Learner(run, model, config))
        return started[-1]

    yield start
    for learner in started:
        learner.close()


def failing_once(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    errors = [error]

    def attempt(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*arguments, **named)

    return attempt


def test_a_store_that_does_not_answer_one_of_many_clients_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, address = host_store("127.0.0.1", 0, 10.0)
    monkeypatch.setattr(
        groups, "TCPStore", failing_once(groups.TCPStore, RuntimeError("The client socket has timed out"))
    )
    start = time.monotonic()
    join_store(address, 10.0).set("a", "1")
    assert store.get("a") == b"1"
    assert time.monotonic() - start < 5.0


def test_a_store_that_never_answers_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    store, address = host_store("127.0.0.1", 0, 10.0)
    assert store is not None

    def never(*_: Any, timeout: Any, **__: Any) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("The client socket has timed out")

    monkeypatch.setattr(groups, "TCPStore", never)
    start = time.monotonic()
    with pytest.raises(SyncFailed, match=r"does not answer; check weights_sync\.host"):
        join_store(address, 3.0)
    assert 2.9 < time.monotonic() - start < 6.0


def test_another_rank_that_cannot_join_the_store_once_costs_an_attempt(
    learn, follow, sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learn(sync)
    _, receiver = follow("g1", sync)
    learner.await_members(1)
    monkeypatch.setattr(part_sender, "join_store", failing_once(part_sender.join_store, SyncFailed("no answer")))
    wanted = learner.offer(0)
    learner.publisher.flush(LONG_S)
    assert_equal(receiver.versions[0], wanted)
    assert learner.publisher.stats.failed_attempts == 1


def test_another_rank_that_can_never_send_ends_the_run_however_many_generators_there_are(
    learn, follow, sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise SyncFailed("the cable is out")

    config = sync.model_copy(update={"no_generator_timeout_s": 4.0, "sync_timeout_s": 2.0})
    learner = learn(config)
    follow("g1", config)
    follow("g2", config)
    learner.await_members(2)
    monkeypatch.setattr(part_sender, "join_store", broken)
    learner.offer(0)
    with pytest.raises((NoReceiver, SyncFailed), match="the cable is out"):
        learner.publisher.flush(LONG_S)
    with pytest.raises(NoReceiver):
        learner.publisher.check()


def test_another_rank_that_stood_still_while_orders_came_and_went_takes_up_the_newest(run, model, follow, sync) -> None:
    old = Publication(version=0, incarnation=0, attempt=0, epoch=0, store="", receivers=(), senders=3)
    order = Order(publication=old, slot=0, base_slot=-1, base_version=-1).packed()
    learner = Learner(run, model, sync)
    for other in learner.others:  # as if they had been stopped since the first order
        other._closed.set()
        other._thread.join(5)
        other._closed.clear()
    for _ in range(5):
        learner.publisher._control.order(order)
    for other in learner.others:
        other._thread = threading.Thread(target=other._run, daemon=True)
        other._thread.start()
    _, receiver = follow("g1", sync)
    learner.await_members(1)
    wanted = learner.offer(0)
    learner.publisher.flush(LONG_S)
    assert_equal(receiver.versions[0], wanted)
    learner.close()


def test_whatever_a_receiver_stumbles_over_is_told_and_the_next_attempt_is_taken(learn, follow, sync, caplog) -> None:
    check = failing_once(lambda manifest: None, KeyError("model.embed.weight"))
    learner = learn(sync)
    _, receiver = follow("g1", sync, check=check)
    learner.await_members(1)
    wanted = learner.offer(0)
    learner.publisher.flush(LONG_S)
    assert_equal(receiver.versions[0], wanted)
    assert "KeyError: 'model.embed.weight'" in caplog.text


def test_an_engine_that_cannot_be_told_once_is_told_again(learn, run, sync) -> None:
    receiver = ThreadReceiver(sync, "g1", lambda manifest: None, run.client)
    receiver._receiver._on_settled = failing_once(receiver._receiver._on_settled, OSError("no space in /dev/shm"))
    follower = Follower(run, "g1", receiver.take, pid=1)
    learner = learn(sync)
    learner.await_members(1)
    wanted = learner.offer(0)
    learner.publisher.flush(LONG_S)
    assert_equal(receiver.versions[0], wanted)
    follower.leave()


@pytest.mark.parametrize("sync", ["disk", "relay"], indirect=True)
def test_one_that_fetches_slowly_does_not_hold_up_the_others(run, follow, sync) -> None:
    """Its own time, a deadline for each of its reads, is half a minute here."""
    config = sync.model_copy(update={"sync_timeout_s": 1.0})
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    _, quick = follow("g1", config)
    slow = ThreadReceiver(config, "g2", lambda manifest: None, run.client)
    wake = threading.Event()

    def take(publication: Publication) -> str:
        wake.wait(LONG_S)
        return slow.take(publication)

    follower = Follower(run, "g2", take, pid=2)
    publisher = Publisher(config=config, connect=run.client, declaration=declare(model), incarnation=0)
    start = time.monotonic()
    for version in range(4):
        publisher.offer(version, model.named_parameters())
        with publisher._changed:
            assert publisher._changed.wait_for(lambda v=version: v in quick.versions, timeout=10), version
    assert time.monotonic() - start < 12.0
    wake.set()
    publisher.flush(LONG_S)
    assert max(slow.versions) == 3
    publisher.close()
    follower.leave()


def test_a_name_that_the_engine_does_not_know_as_the_target_of_a_tied_one_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    manifest = Manifest(version=0, incarnation=0, entries=(), tied={"0.weight": "model.embed.weight"})
    with pytest.raises(LayoutRefused, match=r"0\.weight is tied to model\.embed\.weight in the learner"):
        vllm_plugin.check(model, manifest)


def test_only_what_lies_under_numbers_is_swept(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "run" / "0" / "1", tmp_path / "run" / "keep" / "me"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
        (folder / "x").touch()
    Disk(tmp_path, "run").sweep(())
    assert not ours.exists() and (theirs / "x").exists()
