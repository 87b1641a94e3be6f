"""Somebody's Redis: a user of least privilege, and TLS.

The whole contract suite runs as such a user (conftest.py). The bundled server is built without TLS, so TLS ends in a
small proxy before it; what is tested is the client's side of it, which is ours.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from broker.address import reachable_host
from broker.config import BrokerConfig
from broker.connect import connect
from broker.errors import BrokerError
from broker.messages import Frontier
from broker.redis_connection import acl_rule
from broker.redis_server import RedisServer, find_server

pytestmark = pytest.mark.service

PROMPT_S = 5.0


@pytest.fixture
def config(request: pytest.FixtureRequest) -> BrokerConfig:
    return BrokerConfig(backend="redis", namespace=f"tests/{request.node.name}", reconnect_timeout_s=10.0)


def user(server: RedisServer, name: str, *rule: str) -> str:
    """The url of a new user with this rule, whose password is hunter2."""
    with redis.Redis.from_url(server.url) as raw:
        raw.execute_command("ACL", "SETUSER", name, "reset", "on", ">hunter2", *rule)
    return server.url.replace(f":{server.password}@", f"{name}:hunter2@")


def one_group(config: BrokerConfig, url: str, make: Any) -> None:
    """A prompt's whole way, through ``url``."""
    broker = connect(config, url)
    broker.open_run(rules=make.rules(groups_per_step=1), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(2)))
    (lease,) = broker.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=1.0)
    broker.push(make.group(lease))
    batch = broker.take_batch(version=0, wait_s=1.0)
    assert batch is not None
    broker.trained(batch_id=batch.batch_id, version=1)
    assert broker.state().counts.balanced()
    broker.close()


def test_a_user_of_least_privilege_runs_a_run_and_can_do_nothing_else(
    config: BrokerConfig, redis_server: RedisServer, make: Any
) -> None:
    url = user(redis_server, "least", *acl_rule(config.namespace).split(" "))
    one_group(config, url, make)
    with redis.Redis.from_url(url) as raw:
        for command in (
            *(("GET", "elsewhere"), ("SET", "elsewhere", "1"), ("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*")),
            *(
                ("ACL", "LIST"),
                ("SHUTDOWN",),
                ("SUBSCRIBE", "elsewhere"),
                ("EVAL", "return redis.call('KEYS', '*')", "0"),
            ),
        ):
            with pytest.raises(redis.exceptions.ResponseError, match=r"permission|can't run this command"):
                raw.execute_command(*command)
    elsewhere = connect(config.model_copy(update={"namespace": "another/run"}), url)
    with pytest.raises(BrokerError, match=r"user of broker\.url may not do that .*docs/broker\.md"):
        elsewhere.state()
    elsewhere.close()


@pytest.mark.parametrize("missing", ["info", "evalsha", "eval", "hset", "zadd"])
def test_a_missing_permission_is_told_at_once_and_names_the_setting(
    config: BrokerConfig, redis_server: RedisServer, make: Any, missing: str
) -> None:
    rule = [word for word in acl_rule(config.namespace).split(" ") if word != f"+{missing}"]
    url = user(redis_server, "less", *rule)
    with redis.Redis.from_url(redis_server.url) as raw:
        raw.script_flush()  # so that eval is needed
    began = time.monotonic()
    with pytest.raises(BrokerError, match=r"user of broker\.url may not") as caught:
        one_group(config, url, make)
    assert time.monotonic() - began < PROMPT_S
    assert "hunter2" not in str(caught.value)


def test_a_run_goes_through_a_unix_socket(config: BrokerConfig, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "redis.sock"
    server = subprocess.Popen(
        [str(find_server()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    one_group(config, f"unix://{path}?db=1", make)
    server.terminate()
    server.wait(PROMPT_S)


def test_a_wrong_user_is_told_at_once(config: BrokerConfig, redis_server: RedisServer) -> None:
    broker = connect(config, redis_server.url.replace("redis://:", "redis://nobody:"))
    with pytest.raises(BrokerError, match=r"refused the user or password of broker\.url") as caught:
        broker.state()
    assert redis_server.password not in str(caught.value)
    broker.close()


def certificate(folder: Path, name: str, address: str = "127.0.0.1") -> Path:
    """A self-signed certificate with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    today = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + secret)
    return path


class TlsProxy:
    """Ends TLS before a server; remembers what it saw of the network's side."""

    def __init__(self, cert: Path, target: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = target
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(raw,), daemon=True).start()

    def _one(self, raw: socket.socket) -> None:
        with (
            raw,
            suppress(OSError),
            self._context.wrap_socket(raw, server_side=True) as outer,
            socket.create_connection(("127.0.0.1", self._target)) as inner,
        ):
            back = threading.Thread(target=self._pass_on, args=(inner, outer), daemon=True)
            back.start()
            self._pass_on(outer, inner)
            back.join(PROMPT_S)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_server: RedisServer, tmp_path: Path) -> Iterator[TlsProxy]:
    proxy = TlsProxy(certificate(tmp_path, "ours"), redis_server.port)
    yield proxy
    proxy.close()


def tls_url(server: RedisServer, proxy: TlsProxy, query: str) -> str:
    return f"rediss://:{server.password}@127.0.0.1:{proxy.port}/0{query}"


def test_a_run_goes_over_tls_with_a_certificate_that_was_named(
    config: BrokerConfig, redis_server: RedisServer, proxy: TlsProxy, make: Any, tmp_path: Path
) -> None:
    url = tls_url(redis_server, proxy, f"?ssl_ca_certs={tmp_path}/ours.pem")
    one_group(BrokerConfig(url=url, namespace=config.namespace), url, make)


def test_what_is_wrong_with_tls_is_told_at_once(
    config: BrokerConfig, redis_server: RedisServer, proxy: TlsProxy, tmp_path: Path
) -> None:
    certificate(tmp_path, "theirs")
    elsewhere = TlsProxy(certificate(tmp_path, "elsewhere", "192.0.2.1"), redis_server.port)
    for url, complaint in (
        (
            tls_url(redis_server, proxy, ""),
            r"not trusted \(self.signed.*ssl_ca_certs=FILE in broker\.url",
        ),
        (tls_url(redis_server, proxy, f"?ssl_ca_certs={tmp_path}/theirs.pem"), "not trusted"),
        (tls_url(redis_server, elsewhere, f"?ssl_ca_certs={tmp_path}/elsewhere.pem"), "not trusted .*127.0.0.1"),
    ):
        broker, began = connect(config, url), time.monotonic()
        with pytest.raises(BrokerError, match=complaint) as caught:
            broker.state()
        assert time.monotonic() - began < PROMPT_S
        assert redis_server.password not in str(caught.value)
        broker.close()
    elsewhere.close()
    with pytest.raises(BrokerError, match=r"broker\.url: ssl_ca_certs=.*nowhere\.pem cannot be read"):
        connect(config, tls_url(redis_server, proxy, f"?ssl_ca_certs={tmp_path}/nowhere.pem"))


@pytest.mark.slow
def test_tls_on_one_side_only_ends_with_the_setting(
    config: BrokerConfig, redis_server: RedisServer, proxy: TlsProxy
) -> None:
    secret = redis_server.password
    for url, advice in (
        (f"redis://:{secret}@127.0.0.1:{proxy.port}/0", "does it want TLS there.*rediss://"),
        (f"rediss://:{secret}@127.0.0.1:{redis_server.port}/0", "speak TLS there.*redis://"),
    ):
        broker = connect(config.model_copy(update={"reconnect_timeout_s": 0.5}), url)
        with pytest.raises(BrokerError, match=advice) as caught:
            broker.state()
        assert secret not in str(caught.value)
        broker.close()


def test_c53_a_server_of_ours_on_every_address_tells_one_that_others_reach_and_wants_its_password(
    config: BrokerConfig, make: Any
) -> None:
    server = RedisServer(BrokerConfig(backend="redis", host="0.0.0.0"))
    host = server.url.rpartition("@")[2].rpartition(":")[0]
    assert host == reachable_host("0.0.0.0") != "0.0.0.0"
    one_group(config, server.url, make)
    with pytest.raises(BrokerError, match=r"wants a password, and broker\.url"):
        connect(config, f"redis://{host}:{server.port}/0").state()
    server.stop()
    ours = RedisServer(BrokerConfig(backend="redis", host="::1"))
    one_group(config, ours.url, make)
    ours.stop()


@pytest.mark.service
def test_a_url_without_the_password_and_one_with_a_database_that_is_not_there_say_so(redis_server: Any) -> None:
    bare = re.sub(r"//.*@", "//", redis_server.url)
    with pytest.raises(BrokerError, match=r"wants a password, and broker\.url has none"):
        connect(BrokerConfig(backend="redis"), bare).state()
    with pytest.raises(BrokerError, match=r"broker\.url: Redis has no database 99"):
        connect(BrokerConfig(backend="redis"), re.sub(r"/\d*$", "/99", redis_server.url)).state()
