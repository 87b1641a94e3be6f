"""Which hosts and urls are accepted, and what is shown of them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from broker.address import reachable_host, without_password
from broker.config import BrokerConfig


@pytest.mark.parametrize(
    "url",
    [
        *("foo", "http://h:1", "tcp://", "tcp://x", "tcp://[::1", "tcp://::1:5", "tcp://h:1/x", "tcp://h:0"),
        *("tcp://h:99999", "tcp://h:x", "tcp://*:1", "tcp://h:1?x=1", "tcp://u:p@h:1", "tcp:h:1", " tcp://h:1"),
        *("localhost:5977", "127.0.0.1:5977", "redis://", "redis:///0", "redis://h/x", "redis:/h", "redis://h:1/0#x"),
        *("unix://", "unix:///", "unix://x/y", "unix:///x?db=one", "redis://h?foo=1", "redis://h?ssl_ca_certs=/x"),
        *("redis://h?password=hunter2", "rediss://h?ssl_cert_reqs=maybe"),
    ],
)
def test_a_url_of_no_broker_is_refused_with_the_accepted_forms(url: str) -> None:
    with pytest.raises(ValidationError, match=r"accepted are tcp://HOST:PORT, redis://"):
        BrokerConfig(url=url)


@pytest.mark.parametrize(
    ("url", "backend"),
    [
        ("tcp://h:1", "zmq"),
        ("tcp://[::1]:1", "zmq"),
        ("redis://h", "redis"),
        ("redis://user:p%23w@h:1/0", "redis"),
        ("redis://:p@[::1]:1/0", "redis"),
        ("rediss://h:1/0?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=required", "redis"),
        ("unix:///run/redis.sock?db=1", "redis"),
    ],
)
def test_a_url_is_accepted_and_says_which_backend_it_is_of(url: str, backend: str) -> None:
    assert BrokerConfig(url=url).backend == backend
    shown = without_password(url)
    assert "p@" not in shown and "p%23w" not in shown
    assert BrokerConfig(url=shown).url == shown


def test_a_backend_that_is_not_the_urls_is_refused() -> None:
    for url, backend in (("tcp://h:1", "redis"), ("redis://h:1/0", "zmq")):
        with pytest.raises(ValidationError, match=rf"broker\.backend is {backend}: change one"):
            BrokerConfig(url=url, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["", "*", "[::1]", "h:1", "a b", "tcp://h", "-h"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="expected a host name"):
        BrokerConfig(host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "head.cluster"])
def test_an_address_that_others_reach_is_not_bound_without_keys(host: str) -> None:
    with pytest.raises(ValidationError, match=r"set broker\.security = curve"):
        BrokerConfig(host=host, security="none")
    assert BrokerConfig(host=host).security == "auto"
    assert BrokerConfig(host=host, backend="redis", security="none").host == host  # it always has a password


def test_keys_are_zeromqs() -> None:
    with pytest.raises(ValidationError, match="rediss://"):
        BrokerConfig(backend="redis", security="curve")


def test_no_secret_is_shown_whatever_the_url_looks_like() -> None:
    for url in (
        "redis://:hunter2@h:1/0",
        "redis://user:hun@ter2:hunter2@h",
        "rediss://h?ssl_keyfile=/k&ssl_password=hunter2",
        "redis:/:hunter2@h",
        "redis://[:hunter2@h",
        ":hunter2@h:1",
        "redis://:hunter2/x@h:1/0",
        "redis://:hunter2?x@h:1/0",
        "redis://:hunter2#x@h:1/0",
    ):
        assert "hunter2" not in without_password(url)


def test_without_a_route_a_server_on_every_address_is_reached_here() -> None:
    def nowhere(host: str) -> str:
        raise OSError("Network is unreachable")

    assert reachable_host("0.0.0.0", route=nowhere) == "127.0.0.1"
    assert reachable_host("::", route=nowhere) == "::1"


@pytest.mark.parametrize("name", ["a{b", "a}b", "{a}", "a\nb", "a\x00", "\x1b[31m", "\udc00"])
def test_a_namespace_that_would_break_the_keys_hash_tag_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="without braces and control characters"):
        BrokerConfig(namespace=name)
    assert BrokerConfig(namespace="my project/my run, ünï").namespace == "my project/my run, ünï"


@pytest.mark.parametrize("setting", ["data_dir", "key_file"])
def test_a_path_of_several_lines_is_refused(setting: str) -> None:
    for path in ("a\nb", "a\x00b"):
        with pytest.raises(ValidationError, match="without newlines"):
            BrokerConfig.model_validate({setting: path})
    assert getattr(BrokerConfig.model_validate({setting: "a 'b' \"c\""}), setting) == "a 'b' \"c\""


@pytest.mark.parametrize("sign", ["/", "?", "#", "@/"])
@pytest.mark.parametrize("before", ["hunter2", "123"])
def test_a_sign_in_a_password_that_ends_the_host_is_told_with_its_escape(sign: str, before: str) -> None:
    with pytest.raises(ValidationError, match=r"in a password write @ / [?] # as %40 %2F %3F %23"):
        BrokerConfig(url=f"redis://user:{before}{sign}x@h:1/0")


@pytest.mark.parametrize(
    "url", ["Redis://h:1", "TCP://h:1", "redis://Head:1/0", "rediss://h/0?ssl_ca_certs=/a%20b&db=1"]
)
def test_a_url_is_shown_as_it_was_typed(url: str) -> None:
    assert without_password(url) == url


def test_the_password_of_a_key_file_is_not_shown_however_it_is_spelled() -> None:
    for name in ("ssl_password", "ssl%5Fpassword", "ssl_p%61ssword"):
        assert without_password(f"rediss://h/0?ssl_keyfile=/k&{name}=hunter2") == "rediss://h/0?ssl_keyfile=/k"
