"""Learner ranks that do not send, and receivers that do not take: who is to blame, and that nobody else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from broker.errors import BrokerUnreachable
from broker.local import LocalBroker
from broker.messages import Publication
from tests.weights_sync.sender_process import model_of, part_of
from tests.weights_sync.test_parts import Learner, assert_equal
from weights_sync import part_sender
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import Attempt, Control, beat_key, here_key
from weights_sync.groups import host_store
from weights_sync.incoming import Incoming
from weights_sync.members import STRIKES, live
from weights_sync.publisher import Publisher
from weights_sync.senders import Senders
from weights_sync.staging import declare

LONG_S = 30.0


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))


@pytest.fixture
def learner(run: LocalBroker, model: nn.Module, sync: WeightsSyncConfig) -> Iterator[Learner]:
    learner = Learner(run, model, sync.model_copy(update={"sync_timeout_s": 1.0}))
    yield learner
    learner.close()


class OtherRank:
    """A learner rank in a process (sender_process.py)."""

    def __init__(self, config: WeightsSyncConfig, address: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("sender_process.py")),
                config.model_dump_json(),
                address,
                "2",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self._expect("ready\n")

    def offer(self, version: int, slot: int) -> None:
        assert self.process.stdin is not None
        print(version, slot, file=self.process.stdin, flush=True)
        self._expect("offered\n")

    def _expect(self, line: str) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline() == line


def until(publisher: Publisher, condition: Callable[[], Any]) -> None:
    """Waits for it; the publisher must not end meanwhile."""
    with publisher._changed:
        publisher._changed.wait_for(lambda: publisher._failure is not None or condition(), timeout=LONG_S)
        assert condition(), (publisher._failure, publisher.stats, publisher._blame)
        assert publisher._failure is None, publisher._failure


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["collective", "disk"], indirect=True)
def test_a_learner_rank_that_is_stopped_costs_attempts_by_its_name_and_no_receiver_is_blamed(run, follow, sync) -> None:
    config = sync.model_copy(update={"sync_timeout_s": 1.0})
    receivers = [follow(name, config)[1] for name in ("g1", "g2")]
    publisher = Publisher(config=config, connect=run.client, declaration=declare(model_of(0), parts=2), incarnation=0)
    other = OtherRank(config, publisher.address)
    try:
        until(publisher, lambda: len(live(publisher._members)) == 2)
        for version in range(2):
            slot = publisher.reserve()
            other.offer(version, slot)
            if version == 1:
                other.process.send_signal(signal.SIGSTOP)
            publisher.offer(version, part_of(model_of(version), 0, 2), slot)
            if version == 1:
                until(publisher, lambda: publisher.stats.failed_attempts > STRIKES)
                assert "learner rank 1 gives no sign of life" in publisher._blame.text()
                assert "weights_sync.sync_timeout_s = 1" in publisher._blame.text()
                assert publisher._blame.counts == {}
                other.process.send_signal(signal.SIGCONT)
            until(publisher, lambda v=version: all(v in one.versions for one in receivers))
        wanted = dict(model_of(1).named_parameters())
        for receiver in receivers:
            assert_equal(receiver.versions[1], wanted)
    finally:
        publisher.close()
        other.process.kill()
        other.process.communicate(timeout=10)


def test_a_learner_rank_whose_copy_hangs_costs_attempts_by_its_name_and_no_receiver_is_blamed(
    learner: Learner, follow, sync, monkeypatch
) -> None:
    config = learner.others[0]._config
    receivers = [follow(name, config)[1] for name in ("g1", "g2")]
    learner.await_members(2)
    slots, goes_on = learner.others[0]._slots, threading.Event()
    payload = slots.payload
    monkeypatch.setattr(slots, "payload", lambda *a, **named: (goes_on.wait(LONG_S), payload(*a, **named))[1])
    wanted = learner.offer(0)
    until(learner.publisher, lambda: learner.publisher.stats.failed_attempts >= 2)
    assert "learner rank 1" in learner.publisher._blame.text()
    assert "weights_sync.sync_timeout_s" in learner.publisher._blame.text()
    assert learner.publisher._blame.counts == {}
    goes_on.set()
    learner.publisher.flush(LONG_S)
    for receiver in receivers:
        assert_equal(receiver.versions[0], wanted)


@pytest.mark.parametrize("sync", ["collective"], indirect=True)
def test_a_receiver_that_is_late_for_a_part_is_blamed_and_not_the_one_that_waited_for_it(
    learner: Learner, follow, monkeypatch
) -> None:
    config = learner.others[0]._config
    (_, quick), (_, slow) = follow("g1", config), follow("g2", config)
    learner.await_members(2)
    put, held, goes_on = Incoming.put, slow._receiver._held, threading.Event()

    def late(incoming: Incoming, *part: Any) -> None:
        if incoming._held is held:
            goes_on.wait(LONG_S)
        put(incoming, *part)

    monkeypatch.setattr(Incoming, "put", late)
    learner.offer(0)
    until(learner.publisher, lambda: learner.publisher.stats.failed_attempts == 1)
    assert {member_id for member_id, _ in learner.publisher._blame.counts} == {"g2"}
    assert "g2: rank 2, version 0: did not come for its part in time" in learner.publisher._blame.text()
    goes_on.set()
    learner.publisher.flush(LONG_S)
    assert set(quick.versions) == set(slow.versions) == {0}


@pytest.mark.parametrize("sync", ["relay"], indirect=True)
def test_whatever_another_rank_stumbles_over_is_told_by_its_name(learner: Learner, follow, monkeypatch) -> None:
    _, receiver = follow("g1", learner.others[0]._config)
    learner.await_members(1)
    connect, errors = learner.others[1]._connect, [BrokerUnreachable("no broker at tcp://…")]

    def once() -> Any:
        if errors:
            raise errors.pop()
        return connect()

    learner.others[1]._connect = once
    wanted = learner.offer(0)
    until(learner.publisher, lambda: learner.publisher.stats.failed_attempts == 1)
    assert "learner rank 2: no broker at tcp://" in learner.publisher._blame.text()
    learner.publisher.flush(LONG_S)
    assert_equal(receiver.versions[0], wanted)


def test_another_rank_that_has_lost_the_store_once_takes_orders_again(learner: Learner, follow, monkeypatch) -> None:
    _, receiver = follow("g1", learner.others[0]._config)
    learner.await_members(1)
    newest, errors = part_sender.newest_order, [RuntimeError("Broken pipe")]
    monkeypatch.setattr(part_sender, "newest_order", lambda store: newest(store) if not errors else _raise(errors))
    until(learner.publisher, lambda: not errors)
    wanted = learner.offer(0)
    learner.publisher.flush(LONG_S)
    assert_equal(receiver.versions[0], wanted)


def _raise(errors: list[RuntimeError]) -> int:
    raise errors.pop()


class Looks:
    """Senders of three ranks over a store of its own; rank 0 has sent its part, and it is rank 1's turn."""

    def __init__(self, timeout_s: float) -> None:
        self.store, _ = host_store("127.0.0.1", 0, 10.0)
        publication = Publication(
            version=0, incarnation=0, attempt=7, epoch=1, store="", receivers=("g1", "g2"), senders=3
        )
        self.attempt = Attempt(publication=publication, members=(), sent=True)  # type: ignore[arg-type]
        self.timeout_s = timeout_s
        self.senders = Senders(Control(self.store, parts=3), parts=3, timeout_s=timeout_s)
        self.senders.begin()

    def beat_for(self, seconds: float, *parts: int, every_s: float = 0.02) -> None:
        end, beat = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            beat += 1
            for part in parts:
                self.store.set(beat_key(part), f"{end} {beat}")
            self.senders.look(self.attempt)
            time.sleep(every_s)


def test_ranks_that_beat_are_not_to_blame_and_the_one_that_stopped_is() -> None:
    looks = Looks(0.4)
    for part in (1, 2):
        looks.store.set(f"ready/7/{part}", "1")
    looks.beat_for(0.5, 1, 2)
    assert looks.senders.fault(looks.attempt, since=time.monotonic() - 0.1) == ""
    looks.beat_for(0.5, 1)
    assert "learner rank 2 gives no sign" in looks.senders.fault(looks.attempt, since=time.monotonic() - 0.1)
    assert "learner rank 2 gives no sign" in looks.senders.lost()
    looks.store.set("sent/7/2", "ok 1 1")
    looks.beat_for(0.1, 1)
    assert looks.senders.fault(looks.attempt, since=time.monotonic() - 0.05) == "", "it owes nothing any more"


def test_rank_0_that_stood_still_itself_blames_nobody_else() -> None:
    looks = Looks(0.4)
    looks.beat_for(0.1, 1, 2)
    looks.beat_for(0.1, 1, 2, every_s=0.5)
    looks.beat_for(0.1, 1, 2)
    assert "learner rank 0 itself stood still for 0." in looks.senders.fault(looks.attempt, since=time.monotonic())


def test_a_refusal_before_the_deadline_is_the_receivers_own() -> None:
    looks = Looks(0.4)
    looks.beat_for(0.1, 1, 2)
    looks.store.set(here_key(7, 1, 1), "1")
    now = time.monotonic()
    looks.beat_for(0.05, 1, 2)
    assert looks.senders.fault(looks.attempt, since=now) == "", "rank 1 has its time to seal its part"
    looks.attempt.members = (None, None)  # type: ignore[assignment]
    assert looks.senders.missing(looks.attempt, since=now) == [], "the other has its time to come"
    assert looks.senders.missing(looks.attempt, since=now + 1.0) == [2]
