"""ZeroMQ with keys: who gets in, who does not, and what each is told."""

from __future__ import annotations

import logging
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker.address import reachable_host
from broker.client import ZmqBroker
from broker.config import BrokerConfig
from broker.connect import connect
from broker.errors import BrokerError, BrokerUnreachable
from broker.keys import client_keys, server_keys
from broker.messages import Frontier
from broker.server import BrokerServer

PROMPT_S = 5.0


@pytest.fixture
def config(tmp_path: Path) -> BrokerConfig:
    key_file = str(tmp_path / "run" / "broker.key")
    return BrokerConfig(security="curve", key_file=key_file, reconnect_timeout_s=10.0, max_frame_bytes=1 << 16)


@pytest.fixture
def url(config: BrokerConfig, running_zmq: Any) -> Iterator[str]:
    with running_zmq(config) as address:
        yield address


@contextmanager
def client(config: BrokerConfig, url: str, **changes: Any) -> Iterator[ZmqBroker]:
    broker = ZmqBroker(config.model_copy(update=changes), url)
    try:
        yield broker
    finally:
        broker.close()


def events(config: BrokerConfig, url: str) -> dict[str, int]:
    with client(config, url) as broker:
        return dict(broker.state().counts.events)


def counted(config: BrokerConfig, url: str) -> int:
    """How many were turned away; the failure is told to the server's loop a moment after it happens."""
    deadline = time.monotonic() + PROMPT_S
    while not (count := events(config, url).get("unauthenticated", 0)):
        assert time.monotonic() < deadline, "nobody was counted"
    return count


def other_keys(tmp_path: Path) -> str:
    """The key file of another run."""
    path = str(tmp_path / "other" / "broker.key")
    server_keys(BrokerConfig(security="curve", key_file=path))
    return path


def test_a_client_with_the_runs_key_works_and_its_data_does_not_travel_in_the_clear(
    config: BrokerConfig, url: str, make: Any
) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as tap:
        target = ("127.0.0.1", int(url.rpartition(":")[2]))
        threading.Thread(target=relay, args=(tap, target, heard), daemon=True).start()
        with client(config, f"tcp://127.0.0.1:{tap.getsockname()[1]}") as broker:
            broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
            broker.feed(make.prompts(range(8)))
            assert broker.state().counts.queued == 8
    assert b"CURVE" in b"".join(heard)
    assert b"Feed" not in b"".join(heard) and b"1+1=" not in b"".join(heard)


def relay(tap: socket.socket, target: tuple[str, int], heard: list[bytes]) -> None:
    """Passes one connection on, and remembers all that was said."""
    ours, _ = tap.accept()
    theirs = socket.create_connection(target)

    def one_way(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                heard.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    back = threading.Thread(target=one_way, args=(theirs, ours), daemon=True)
    back.start()
    one_way(ours, theirs)
    back.join(PROMPT_S)
    ours.close()
    theirs.close()


def test_a_client_without_a_key_is_told_at_once_and_counted(config: BrokerConfig, url: str) -> None:
    began = time.monotonic()
    with (
        client(config, url, security="none") as stranger,
        pytest.raises(BrokerError, match=r"set broker\.security = curve, and broker\.key_file"),
    ):
        stranger.state()
    assert time.monotonic() - began < PROMPT_S
    assert counted(config, url) >= 1


def test_a_client_with_another_runs_client_key_is_told_at_once_counted_and_logged_once(
    config: BrokerConfig, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = Path(config.key_file).read_text(), Path(other_keys(tmp_path))
    foreign = other.read_text().splitlines()
    foreign[1] = mine.splitlines()[1]  # it knows the server, but the server does not know it
    other.write_text("\n".join(foreign) + "\n")
    for _ in range(3):
        with (
            client(config, url, key_file=str(other)) as stranger,
            pytest.raises(BrokerError, match=r"does not know our key: broker\.key_file = .*other/broker\.key"),
        ):
            stranger.state()
    assert counted(config, url) >= 3
    said = [one.message for one in caplog.records if "turned away" in one.message]
    assert len(said) == 1 and "127.0.0.1" in said[0]


def test_a_client_with_the_key_of_another_broker_hears_soon_that_its_key_may_be_wrong(
    config: BrokerConfig, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server cannot answer it in a way that it could read, so this one is told from the silence."""
    settings = {"key_file": other_keys(tmp_path), "reconnect_timeout_s": 2.5}
    began = time.monotonic()
    with (
        client(config, url, **settings) as stranger,
        pytest.raises(BrokerUnreachable, match=r"broker\.key_file = .*other/broker\.key may be of another run"),
    ):
        stranger.state()
    assert time.monotonic() - began < 2.5 + PROMPT_S
    assert any("waiting for" in one.message and "broker.key_file" in one.message for one in caplog.records)
    assert counted(config, url) >= 1


def test_a_client_with_a_key_at_a_broker_without_is_told_at_once(config: BrokerConfig, running_zmq: Any) -> None:
    server_keys(config)
    with (
        running_zmq(BrokerConfig()) as plain,
        client(config, plain) as broker,
        pytest.raises(BrokerError, match=r"wants no keys: set broker\.security = none here"),
    ):
        broker.state()


def test_raw_peers_get_nothing_and_change_nothing(config: BrokerConfig, url: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(url)
    peer.send_multipart([b"anything", b"at all"])
    assert not peer.poll(300)
    assert "malformed" not in events(config, url)
    context.destroy(linger=0)


def test_a_client_whose_key_file_is_missing_or_broken_is_told_which(config: BrokerConfig, tmp_path: Path) -> None:
    nowhere = config.model_copy(update={"key_file": str(tmp_path / "nowhere")})
    with pytest.raises(BrokerError, match=r"broker\.key_file = .*nowhere: No such file"):
        connect(nowhere, "tcp://10.0.0.5:1")
    broken = tmp_path / "broken.key"
    broken.write_text("server-public hunter2\nclient-secret hunter2\n")
    with pytest.raises(BrokerError, match=r"broken\.key is not a key file") as caught:
        connect(config.model_copy(update={"key_file": str(broken)}), "tcp://10.0.0.5:1")
    assert "hunter2" not in str(caught.value)


def test_a_broker_started_again_has_the_same_keys_and_its_clients_never_notice(
    config: BrokerConfig, running_zmq: Any
) -> None:
    with running_zmq(config) as url:
        broker = ZmqBroker(config, url)
        broker.state()
    Path(config.key_file).unlink()  # what clients need is made again from what the server keeps
    with running_zmq(config.model_copy(update={"port": int(url.rpartition(":")[2])})):
        assert broker.state().counts.fed == 0
        assert events(config, url) == {}
    broker.close()


def test_keys_are_readable_by_their_owner_alone_and_do_not_show(
    config: BrokerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    keys = server_keys(config)
    files = sorted(Path(config.key_file).parent.iterdir())
    assert [file.name for file in files] == ["broker.key", "broker.server.key"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert keys is not None and keys.secret.decode() not in repr(keys)
    assert keys.secret.decode() not in files[0].read_text()  # a client cannot pose as the server
    files[0].chmod(0o644)
    with caplog.at_level(logging.WARNING):
        shown = repr(client_keys(config, "tcp://127.0.0.1:1"))
    assert "chmod 600" in caplog.text
    assert files[0].read_text().split()[-1] not in shown + caplog.text


def test_a_clients_copy_of_the_key_does_not_become_a_brokers(config: BrokerConfig) -> None:
    server_keys(config)
    Path(config.key_file).with_name("broker.server.key").unlink()
    with pytest.raises(BrokerError, match="start the broker where that is, or remove the file"):
        server_keys(config)


def test_keys_are_wanted_unless_only_this_machine_can_connect(tmp_path: Path) -> None:
    key_file = str(tmp_path / "broker.key")
    assert server_keys(BrokerConfig(key_file=key_file)) is None
    assert server_keys(BrokerConfig(key_file=key_file, host="localhost")) is None
    assert server_keys(BrokerConfig(key_file=key_file, host="0.0.0.0")) is not None
    assert client_keys(BrokerConfig(key_file=key_file), "tcp://127.0.0.1:1") is None
    assert client_keys(BrokerConfig(key_file=key_file), "tcp://[::1]:1") is None
    assert client_keys(BrokerConfig(key_file=key_file), "tcp://10.0.0.5:1") is not None
    # A machine without any route announces 0.0.0.0 as its loopback address: still the same broker.
    assert client_keys(BrokerConfig(key_file=key_file, host="0.0.0.0"), "tcp://127.0.0.1:1") is not None


def test_c53_the_address_told_to_others_is_not_local(config: BrokerConfig, running_zmq: Any) -> None:
    everywhere = config.model_copy(update={"host": "0.0.0.0", "security": "auto"})
    with running_zmq(everywhere) as url:
        host = url.removeprefix("tcp://").rpartition(":")[0]
        assert host == reachable_host("0.0.0.0")
        assert host not in ("0.0.0.0", "localhost")
        assert events(everywhere, url) == {}
    assert reachable_host("0.0.0.0", route=lambda host: "10.0.0.5") == "10.0.0.5"
    assert reachable_host("::", route=lambda host: "2001:db8::5") == "2001:db8::5"
    assert reachable_host("10.0.0.7", route=lambda host: "10.0.0.5") == "10.0.0.7"


def test_ipv6_addresses_work(config: BrokerConfig, running_zmq: Any) -> None:
    for host, name in (("::1", "[::1]"), ("::", "[")):
        with running_zmq(config.model_copy(update={"host": host})) as url:
            assert url.startswith(f"tcp://{name}")
            assert events(config, url) == {}


def test_a_server_that_cannot_have_its_keys_frees_what_it_took(config: BrokerConfig) -> None:
    with pytest.raises(BrokerError, match=r"set broker\.key_file"):
        BrokerServer(config.model_copy(update={"key_file": ""}))
    Path(config.key_file).parent.write_text("in the way")
    with pytest.raises(BrokerError, match=r"broker\.key_file = .* cannot be used"):
        BrokerServer(config)
