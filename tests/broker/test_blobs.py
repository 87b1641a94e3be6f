"""Blobs of broker/blobs.py, over every backend."""

from __future__ import annotations

import numpy as np
import pytest

from broker.config import BrokerConfig
from broker.connect import connect
from broker.errors import Refused
from broker.local import LocalBroker
from broker.messages import Frontier

DATA = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()


def test_a_blob_is_kept_as_it_is_until_it_is_swept_away(hub) -> None:
    sender, reader = hub.client(), hub.client()
    sender.put_blob("run/0/1/a", DATA)
    sender.put_blob("run/0/1/a", DATA[:70_000])  # again, and shorter
    sender.put_blob("run/0/2/b", b"")
    for _ in range(2):
        assert bytes(reader.get_blob("run/0/1/a")) == DATA[:70_000]
    assert bytes(reader.get_blob("run/0/2/b")) == b""
    assert reader.get_blob("run/0/1/b") is None
    assert sender.sweep_blobs(["run/0/2/", "other/"]) == 1
    assert reader.get_blob("run/0/1/a") is None and reader.get_blob("run/0/2/b") is not None
    assert sender.sweep_blobs([]) == 1


def test_blobs_are_no_part_of_the_books_and_stay_when_a_run_is_opened(hub, make) -> None:
    broker = hub.client()
    broker.put_blob("a", DATA)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    state = broker.state()
    assert state.counts.total() == 0 and state.buffered_bytes == 0
    assert bytes(broker.get_blob("a")) == DATA


def test_more_than_may_be_held_is_refused_with_the_setting_and_nothing_is_lost(hub, monkeypatch) -> None:
    broker = hub.client()
    limited = broker._config.model_copy(update={"max_blob_bytes": 1 << 20})
    monkeypatch.setattr(broker, "_config", limited)
    broker.put_blob("a", bytes(600_000))
    with pytest.raises(Refused, match=r"blob b would make 1200000 bytes .*broker\.max_blob_bytes = 1048576"):
        broker.put_blob("b", bytes(600_000))
    assert broker.get_blob("b") is None and len(broker.get_blob("a")) == 600_000
    broker.put_blob("a", bytes(700_000))  # in place of itself
    broker.sweep_blobs(["b"])
    broker.put_blob("b", bytes(1 << 20))


def test_a_blob_over_the_largest_frame_is_refused() -> None:
    broker = LocalBroker(BrokerConfig(max_frame_bytes=1 << 12))
    with pytest.raises(Refused, match=r"broker\.max_frame_bytes = 4096"):
        broker.put_blob("a", bytes(5000))


def test_a_broker_does_not_remember_blobs_that_it_has_answered_with(running_zmq) -> None:
    config = BrokerConfig()
    serving = running_zmq(config)
    with serving as url:
        client = connect(config, url)
        client.put_blob("a", DATA)
        client.get_blob("a")
        client.sweep_blobs([])
        sessions = serving.server._sessions.values()
        assert not any(len(frame) == len(DATA) for session in sessions for frame in session.reply or [])
        client.close()
