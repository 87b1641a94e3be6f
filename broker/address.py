"""Hosts and urls of brokers: which ones we accept, and how others reach what we bind."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from urllib.parse import parse_qsl, unquote, urlsplit

ZMQ_FORMS = "tcp://HOST:PORT"
REDIS_FORMS = "redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss://… (TLS) or unix:///PATH/TO/SOCKET[?db=N]"
ACCEPTED = f"accepted are {ZMQ_FORMS}, {REDIS_FORMS}; an IPv6 address stands in brackets"
BACKENDS = {"tcp": "zmq", "redis": "redis", "rediss": "redis", "unix": "redis"}
TLS_FILES = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"})
_TLS_OPTIONS = TLS_FILES | {"ssl_password", "ssl_cert_reqs", "ssl_check_hostname"}
OPTIONS = {"tcp": frozenset[str](), "redis": frozenset({"db"}), "rediss": _TLS_OPTIONS | {"db"}, "unix": {"db"}}
_ESCAPE = "in a password write @ / ? # as %40 %2F %3F %23"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_PUBLIC = {  # RFC 5737 and 3849 documentation addresses; connecting UDP sends nothing
    "0.0.0.0": (socket.AF_INET, ("192.0.2.1", 9)),
    "::": (socket.AF_INET6, ("2001:db8::1", 9)),
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than localhost may be anything: it is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(host: str) -> None:
    """Raises ValueError for what is neither a name nor an address to bind."""
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
            return
    except ValueError as error:
        raise ValueError(
            "expected a host name, an IPv4 address or an IPv6 address without brackets; broker.port is its own setting"
        ) from error
    if not _NAME.fullmatch(host):
        empty = "an empty one would listen on every address; " if not host else ""
        raise ValueError(f"expected a host name or an address to listen on; {empty}127.0.0.1 is this machine alone")


def check_url(url: str) -> None:
    """Raises ValueError, without the url's password, for a url that names no broker."""
    escaped = f"; {_ESCAPE}" if _has_loose_signs(url) else ""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # brackets that do not match, a port that is no number below 65536
        raise ValueError(f"is not a url{escaped}; {ACCEPTED}") from error
    if parts.scheme not in BACKENDS or not url.startswith(f"{parts.scheme}://"):
        raise ValueError(f"names no broker; {ACCEPTED}")
    problem = _unix_problem(parts.netloc, parts.path) if parts.scheme == "unix" else _host_problem(url, host, port)
    if not problem and parts.fragment:
        problem = "has a # in it" + ("" if escaped else f"; {_ESCAPE}")
    if not problem and parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?[0-9]*", parts.path):
        problem = "ends in something that is not a database's number"
    problem = problem or _option_problem(parts.scheme, parts.query)
    if problem:
        raise ValueError(f"{problem}{escaped}; {ACCEPTED}")


def _has_loose_signs(url: str) -> bool:
    """Whether the part before the last @ holds a sign that ends a url's host: in a password, most likely."""
    secret, at, _ = url.partition("://")[2].rpartition("@")
    return bool(at and re.search(r"[@/?#]", secret))


def _host_problem(url: str, host: str, port: int | None) -> str:
    scheme, _, rest = url.partition("://")
    if not host:
        return "names no host"
    try:
        check_host(host)
    except ValueError:
        return "names no valid host"
    if port == 0 or (port is None and scheme == "tcp"):
        return "names no port"
    if scheme == "tcp" and "@" in rest:
        return "has a user or a password, which ZeroMQ does not know (keys are in broker.key_file)"
    if scheme == "tcp" and re.search(r"[/?#]", rest):
        return "has something after the port"
    return ""


def _unix_problem(netloc: str, path: str) -> str:
    if netloc.rpartition("@")[2] or len(path) < 2:
        return "names no socket's absolute path"
    return ""


def _option_problem(scheme: str, query: str) -> str:
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS[scheme]:
            known = ", ".join(sorted(OPTIONS[scheme])) or "none"
            return f"has the option {name!r}; options of {scheme}:// are {known}"
        if name == "db" and not value.isdecimal():
            return "has a db that is not a number"
        if name == "ssl_cert_reqs" and value not in ("none", "optional", "required"):
            return "has an ssl_cert_reqs that is not none, optional or required"
    return ""


def without_password(url: str) -> str:
    """The url without user, password and the password of a key file. Of what is no url, what follows the last @."""
    shown = url.rpartition("@")[2]
    try:
        parts = urlsplit(url)
    except ValueError:
        return shown
    after = url[len(parts.scheme) + len("://") + len(parts.netloc) :]
    if parts.scheme not in BACKENDS or ("@" in after and (parts.netloc or parts.scheme != "unix")):
        return shown  # a password with a /, ? or # in it, most likely
    options = "&".join(pair for pair in parts.query.split("&") if "password" not in unquote(pair.partition("=")[0]))
    place = f"{url[: len(parts.scheme)]}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{place}?{options}" if options else place


def resolve(host: str) -> str:
    """The address to bind; an IPv4 one where a name has both. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def unknown_host(url: str) -> str:
    """Why the url's host has no address now, in words; empty where it has one, or needs none."""
    host = urlsplit(url).hostname
    try:
        if host:
            resolve(host)
    except OSError as error:
        return f"broker.url={without_password(url)}: {host} does not resolve: {error.strerror}"
    return ""


def bracketed(host: str) -> str:
    """The host as it stands in a url."""
    return f"[{host}]" if ":" in host else host


def reachable_host(host: str, *, route: Callable[[str], str] | None = None) -> str:
    """The name under which others reach a server bound to ``host``: for 0.0.0.0 and ::, that of the default route."""
    try:
        return (route or _own_address)(host) if host in _PUBLIC else host
    except OSError:  # no route to anywhere: nobody else is there to reach it
        return "::1" if ":" in host else "127.0.0.1"


def _own_address(any_address: str) -> str:
    family, target = _PUBLIC[any_address]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
