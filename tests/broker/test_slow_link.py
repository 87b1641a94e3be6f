"""A link that is slower than the patience of a client: everything arrives, and none of it is sent twice."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from broker.client import ZmqBroker
from broker.config import BrokerConfig
from broker.messages import Frontier

LONG_S = 60.0


class Link:
    """A TCP relay to a port of this machine that lets ``rate`` bytes a second pass upwards and counts them."""

    def __init__(self, port: int, rate: float) -> None:
        self._port, self._rate = port, rate
        self.up = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._ends: list[socket.socket] = []
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks the connections there are."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.close() if end.fileno() < 0 else end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [near, far]
            threading.Thread(target=self._pass, args=(near, far, self._rate), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, 0.0), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, rate: float) -> None:
        try:
            while data := source.recv(1 << 14):
                if rate:
                    self.up += len(data)
                    time.sleep(len(data) / rate)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()


@contextmanager
def linked(running_zmq: Any, rate: float) -> Iterator[tuple[Link, ZmqBroker, ZmqBroker]]:
    """The link, a client near the broker, and one behind the link."""
    config = BrokerConfig(reconnect_timeout_s=LONG_S)
    with running_zmq(config) as url:
        link = Link(int(url.rpartition(":")[2]), rate)
        near, far = ZmqBroker(config, url), ZmqBroker(config, link.url)
        yield link, near, far
        near.close()
        far.close()
        link.close()


@pytest.mark.slow
def test_groups_over_a_slow_link_are_sent_once(running_zmq: Any, make: Any) -> None:
    """About 9 MB at 0.7 MB/s: longer than any pause between two probes and than the heartbeat's own patience."""
    with linked(running_zmq, rate=7e5) as (link, near, far):
        near.open_run(rules=make.rules(groups_per_step=8), version=0, frontier=Frontier())
        near.feed(make.prompts(range(8)))
        leases = near.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=8, wait_s=0.0)
        groups = [make.group(one, ((0, 64_000),)) for one in leases]
        start = time.monotonic()
        outcomes = far.push_all(groups)
        assert time.monotonic() - start > 8.0, "the link is not slow"
        assert [one.value for one in outcomes] == ["accepted"] * 8
        batch = near.take_batch(version=0, wait_s=0.0)
        assert batch is not None and len(batch.groups) == 8
        raw = sum(
            c.token_ids.nbytes + c.behavior_logprobs.nbytes + c.loss_mask.nbytes for g in groups for c in g.completions
        )
        assert raw < link.up < 1.05 * raw


def test_a_call_whose_connection_broke_on_the_way_is_sent_again_and_takes_effect_once(
    running_zmq: Any, make: Any
) -> None:
    with linked(running_zmq, rate=1e6) as (link, near, far):
        near.open_run(rules=make.rules(groups_per_step=1), version=0, frontier=Frontier())
        near.feed(make.prompts(range(1)))
        (lease,) = near.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=0.0)
        group = make.group(lease, ((0, 64_000),))
        far.state()
        before = link.up
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(far.push(group)))
        thread.start()
        while link.up < before + 300_000:
            time.sleep(0.005)
        link.cut()
        thread.join(LONG_S)
        assert [one.value for one in found] == ["accepted"]
        assert near.state().counts.events == {}
