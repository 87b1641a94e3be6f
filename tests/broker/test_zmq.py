"""The ZeroMQ server and client beyond the contract: bad input, lost connections, and restarts."""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker import calls
from broker.client import ZmqBroker
from broker.codec import decode, encode
from broker.config import BrokerConfig
from broker.connect import connect
from broker.errors import BrokerError, BrokerUnreachable, NoOpenRun, Refused
from broker.frame import Writer
from broker.heads import LeaseHead
from broker.messages import SCHEMA_VERSION, Frontier, Lease
from broker.serve import serve
from broker.server import BrokerServer
from broker.wire import ReplyHead, RequestHead, read_value

LONG_S = 20.0
PROMPT_S = 3.0


class Peer:
    """Someone who speaks to the server by hand."""

    def __init__(self, url: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(url)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def ask(self, *frames: bytes) -> tuple[ReplyHead, list[bytes]]:
        self.send(*frames)
        return self.hear()

    def hear(self) -> tuple[ReplyHead, list[bytes]]:
        assert self.socket.poll(int(1000 * LONG_S)), "no answer"
        head, *frames = self.socket.recv_multipart()
        return decode(head, ReplyHead, max_bytes=1 << 16), frames

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def config() -> BrokerConfig:
    return BrokerConfig(reconnect_timeout_s=10.0, max_frame_bytes=1 << 16)


@pytest.fixture
def url(config: BrokerConfig, running_zmq: Any) -> Iterator[str]:
    with running_zmq(config) as address:
        yield address


@pytest.fixture
def peer(url: str) -> Iterator[Peer]:
    peer = Peer(url)
    yield peer
    peer.close()


@pytest.fixture
def broker(config: BrokerConfig, url: str, make: Any) -> Iterator[ZmqBroker]:
    broker = ZmqBroker(config, url)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(8)))
    yield broker
    broker.close()


def head(request_id: int, call: str, wait_s: float = 0.0) -> bytes:
    return encode(RequestHead(request_id=request_id, call=call, wait_s=wait_s))


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([b"", b""], "malformed frame"),
        ([b"\xc1junk"], "malformed frame"),
        ([Writer().frame([SCHEMA_VERSION + 1, "RequestHead", [1, "Feed", 0.0]])], "run one version on both sides"),
        ([head(1, "Feed")], "no call 'Feed' with 0 frames"),
        ([head(1, "__class__"), b""], "no call '__class__'"),
        ([head(1, "Feed"), encode(Frontier())], "'Frontier' where Feed was expected"),
        ([head(1, "Feed"), b"x" * ((1 << 16) + 1)], "broker.max_frame_bytes"),
        ([head(1, "Feed"), encode(calls.Feed(items=("0",))), b"x" * ((1 << 16) + 1)], "broker.max_frame_bytes"),
        ([head(1, "Feed"), encode(calls.Feed(items=("0",))), b"x", b"x"], "Feed with 2 bodies, where 1 were expected"),
        ([head(1, "Finish"), encode(calls.Finish(reason="")), *[b""] * 5000], "a request of more than 512 frames"),
        ([head(1, "ReadState", math.nan), encode(calls.ReadState(after_revision=99))], "waits for nan seconds"),
        ([head(1, "ReadState", math.inf), encode(calls.ReadState(after_revision=99))], "waits for inf seconds"),
        ([head(1, "ReadState", -1.0), encode(calls.ReadState(after_revision=99))], "waits for -1.0 seconds"),
    ],
)
def test_bad_requests_are_refused_counted_and_harm_nobody(
    broker: ZmqBroker, peer: Peer, frames: list[bytes], complaint: str
) -> None:
    reply, _ = peer.ask(*frames)
    assert reply.outcome == "refused"
    assert re.search(re.escape(complaint), reply.text)
    assert broker.state().counts.events == {"malformed": 1}
    assert broker.state().counts.queued == 8


def test_c50_a_generator_that_exits_right_behind_its_last_push_has_delivered_all(
    config: BrokerConfig, url: str, make: Any
) -> None:
    """``push`` returns when the group is in the ledger, so nothing is left in a socket that its process closes."""
    learner = ZmqBroker(config, url)
    learner.open_run(rules=make.rules(groups_per_step=100), version=0, frontier=Frontier())
    learner.feed(make.prompts(range(100)))
    sample = make.group(Lease(lease_id="", prompt=make.prompt(0), attempt=1, incarnation=0))
    source = f"""
import dataclasses, os, sys
from broker.client import ZmqBroker
from broker.codec import decode
from broker.config import BrokerConfig
from broker.messages import Group
sample = decode(sys.stdin.buffer.read(), Group, max_bytes=1 << 20)
broker = ZmqBroker(BrokerConfig(), {url!r})
for one in broker.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=100, wait_s=10.0):
    broker.push(dataclasses.replace(sample, lease_id=one.lease_id, prompt=one.prompt))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", source], input=encode(sample), check=True, timeout=60)
    batch = learner.take_batch(version=0, wait_s=0)
    assert batch is not None and len(batch.groups) == 100
    learner.close()


def test_a_wait_of_years_is_a_wait_like_others(broker: ZmqBroker, peer: Peer) -> None:
    peer.send(head(1, "ReadPublication", 1e300), encode(calls.ReadPublication(after_attempt=0)))
    assert broker.state().counts.queued == 8
    broker.finish("enough")
    assert peer.hear()[0].outcome == "ok"


def test_a_frame_far_over_the_limit_ends_its_connection_unread_and_nobody_elses(broker: ZmqBroker, peer: Peer) -> None:
    peer.send(head(1, "Feed"), b"x" * (1 << 20))
    assert not peer.socket.poll(300)
    assert broker.state().counts.queued == 8


def test_peers_that_flood_the_server_with_garbage_do_not_stop_the_others(broker: ZmqBroker, url: str) -> None:
    """Two send frames as fast as they can, one sends bytes that are not even ZeroMQ's."""
    stop = threading.Event()

    def frames() -> None:
        peer = Peer(url)
        while not stop.is_set():
            if peer.socket.poll(100, zmq.POLLOUT):
                peer.send(b"\xc1junk", b"x" * 1000)
            while peer.socket.poll(0):
                peer.socket.recv_multipart()
        peer.close()

    def raw() -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0) as one:
                one.sendall(b"GET / HTTP/1.1\r\n" * 1000)

    with ThreadPoolExecutor(3) as pool:
        floods = [pool.submit(frames), pool.submit(frames), pool.submit(raw)]
        try:
            start, asked = time.monotonic(), 0
            while asked < 50 or broker.state().counts.events.get("malformed", 0) < 1000:
                assert broker.state().counts.queued == 8
                asked += 1
                assert time.monotonic() - start < LONG_S
        finally:
            stop.set()
        assert [flood.result(LONG_S) for flood in floods] == [None] * 3


def test_c120_a_pickle_bomb_on_the_socket_is_refused_and_never_run(
    broker: ZmqBroker, peer: Peer, tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    for frames in ([pickle.dumps(Bomb())], [head(1, "Push"), pickle.dumps(Bomb())]):
        assert peer.ask(*frames)[0].outcome == "refused"
    assert broker.state().counts.events == {"malformed": 2}
    assert not (tmp_path / "exploded").exists()


def test_a_call_that_is_too_large_is_refused_before_it_is_sent(broker: ZmqBroker, make: Any) -> None:
    (lease,) = broker.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=0)
    with pytest.raises(Refused, match=r"broker\.max_frame_bytes = 65536"):
        broker.push(make.group(lease, ((0, 20000),)))


def test_a_batch_may_be_larger_than_a_frame(broker: ZmqBroker, make: Any) -> None:
    for lease in broker.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=2, wait_s=0):
        broker.push(make.group(lease, ((0, 3000),)))
    batch = broker.take_batch(version=0, wait_s=0)
    assert batch is not None
    assert len(encode(batch)) > 1 << 16


def test_a_lease_request_sent_again_gets_the_same_answer_not_more_prompts(broker: ZmqBroker, peer: Peer) -> None:
    call = calls.LeasePrompts(member_id="p", policy_version=0, incarnation=0, max_prompts=1, token="one call")
    answers: list[tuple[LeaseHead, ...]] = []
    for _ in range(2):
        _, frames = peer.ask(head(5, "LeasePrompts"), encode(call))
        answers.append(read_value(call, frames, max_bytes=1 << 16)[0])
    assert [one.lease_id for one in answers[0]] == [one.lease_id for one in answers[1]]
    assert broker.state().counts.leased == 1


def test_a_waiting_request_sent_again_is_told_to_go_on_waiting(broker: ZmqBroker, peer: Peer, make: Any) -> None:
    request = head(1, "ReadPublication", LONG_S), encode(calls.ReadPublication(after_attempt=0))
    peer.send(*request)
    assert peer.ask(*request)[0].outcome == "waiting"
    broker.finish("enough")
    assert peer.hear()[0].outcome == "ok"


def test_prompts_for_a_client_that_died_waiting_are_queued_again_at_once(config: BrokerConfig, make: Any) -> None:
    """The server is driven by hand, so that the request, the death and the prompts come in this order."""
    server = BrokerServer(config)
    peer = Peer(server.url)
    call = calls.LeasePrompts(member_id="dead", policy_version=0, incarnation=0, max_prompts=2, token="t")
    peer.send(head(1, "LeasePrompts", LONG_S), encode(call))
    assert server._router.poll(int(1000 * LONG_S))
    server._take_requests()
    (sender,) = server._sessions
    peer.close()
    deadline = time.monotonic() + LONG_S
    while server._send(sender, [b""]):
        assert time.monotonic() < deadline, "the server never noticed"
    server.ledger.open_run(rules=make.rules(), version=0, frontier=Frontier(), token="t")
    server.ledger.feed(["0", "1"], [b"", b""])
    server._ask_again()
    server._flush()
    assert (server.ledger.items.counts().queued, server.ledger.items.counts().leased) == (2, 0)
    assert not server._waiting
    server.close()


def test_c113_a_busy_port_names_the_setting(url: str) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(BrokerError, match=rf"port {port} .* set broker\.port"):
        serve(BrokerConfig(port=port), ready=lambda url: None, stop=threading.Event())


def test_an_address_that_is_not_ours_names_the_setting(tmp_path: Path) -> None:
    elsewhere = BrokerConfig(host="198.51.100.1", key_file=str(tmp_path / "broker.key"))
    with pytest.raises(BrokerError, match=r"broker\.host"):
        serve(elsewhere, ready=lambda url: None, stop=threading.Event())


def test_c113_eight_servers_at_once_get_eight_ports() -> None:
    stop, ports = threading.Event(), list[str]()

    def one(_: int) -> None:
        serve(BrokerConfig(), ready=lambda url: (ports.append(url), len(ports) == 8 and stop.set()), stop=stop)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert len(set(ports)) == 8


def test_a_broker_that_stays_silent_is_unreachable_and_the_error_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = BrokerConfig(reconnect_timeout_s=0.5)
        broker = connect(config, f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(BrokerUnreachable, match=r"broker\.reconnect_timeout_s = 0\.5"):
            broker.take_batch(version=0, wait_s=600.0)
        assert time.monotonic() - start < PROMPT_S
        broker.close()


def test_a_url_of_no_broker_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(BrokerError, match=r"broker\.url must be"):
        connect(BrokerConfig(), "http://127.0.0.1:1")


def test_a_restarted_server_is_found_again_and_says_that_it_has_forgotten_the_run(
    config: BrokerConfig, running_zmq: Any, make: Any
) -> None:
    """The wait of a generator goes on over the outage; the learner is told, opens the run again, and all goes on."""
    with ThreadPoolExecutor(1) as pool:
        with running_zmq(config) as url:
            learner, generator = ZmqBroker(config, url), ZmqBroker(config, url)
            learner.open_run(rules=make.rules(), version=0, frontier=Frontier())
            assert generator.state().incarnation == 0
            waiting = pool.submit(
                generator.lease, member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=LONG_S
            )
        again = config.model_copy(update={"port": int(url.rpartition(":")[2])})
        with running_zmq(again) as url:
            with pytest.raises(NoOpenRun, match="a learner opens it"):
                learner.take_batch(version=0, wait_s=LONG_S)
            learner.open_run(rules=make.rules(), version=0, frontier=Frontier())
            learner.feed(make.prompts(range(2)))
            (lease,) = waiting.result(LONG_S)
            assert lease.prompt.item == "0"
            assert learner.state().counts.balanced()
            learner.close()
            generator.close()
