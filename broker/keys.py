"""The keys of one run's ZeroMQ broker (CURVE, RFC 26 of ZeroMQ): who may talk to it, and that nobody listens.

    <run folder>/broker.key           for clients: copied to the other hosts, named by broker.key_file there
    <run folder>/broker.server.key    the broker's own: never leaves its host; a broker started again has the same keys

One key pair is the server's, one is shared by all clients of the run. Both files can be read by their owner alone.
"""

from __future__ import annotations

import logging
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from broker.address import is_loopback
from broker.config import BrokerConfig
from broker.errors import BrokerError

log = logging.getLogger(__name__)

_CLIENT: tuple[str, ...] = ("server-public", "client-secret")
_SERVER: tuple[str, ...] = ("server-secret", "client-secret")
_NOTE = {
    _CLIENT: "Slipstream: what a client of this run's broker needs, see broker.key_file. Keep it secret.",
    _SERVER: "Slipstream: the keys of this run's broker. Keep it secret, and on the broker's host.",
}


@dataclass(frozen=True, kw_only=True)
class ClientKeys:
    """What a client shows, and whom it expects."""

    server_public: bytes
    secret: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """The public half of ``secret``."""
        return zmq.curve_public(self.secret)


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """What the server shows, and whom it lets in."""

    secret: bytes = field(repr=False)
    client_public: bytes

    @property
    def public(self) -> bytes:
        """The public half of ``secret``."""
        return zmq.curve_public(self.secret)


def key_file(config: BrokerConfig) -> Path | None:
    """The file with which clients get into the broker that these settings start; None when they need none."""
    if config.backend != "zmq" or config.security == "none":
        return None
    return None if config.security == "auto" and is_loopback(config.host) else _named(config)


def server_keys(config: BrokerConfig) -> ServerKeys | None:
    """The keys of the broker that these settings start, made when there are none; None when it needs none.

    Raises BrokerError when they cannot be read or kept.
    """
    client_file = key_file(config)
    if client_file is None:
        return None
    server_file = client_file.with_name(f"{client_file.stem}.server{client_file.suffix}")
    try:
        if not server_file.is_file():
            if client_file.is_file():
                raise BrokerError(
                    f"broker.key_file = {client_file} is of a broker elsewhere, its own key {server_file} is not here:"
                    " start the broker where that is, or remove the file to have new keys"
                )
            _write(server_file, _SERVER, (zmq.curve_keypair()[1], zmq.curve_keypair()[1]))
        secret, client_secret = _read(server_file, _SERVER)
        _write(client_file, _CLIENT, (zmq.curve_public(secret), client_secret))
    except OSError as error:
        raise BrokerError(f"broker.key_file = {client_file} cannot be used: {error}") from error
    return ServerKeys(secret=secret, client_public=zmq.curve_public(client_secret))


def client_keys(config: BrokerConfig, url: str) -> ClientKeys | None:
    """The keys to talk to the broker at ``url``; None when that needs none. Raises BrokerError that names the setting.

    ``auto``: none are needed if the broker can only be on this machine.
    """
    local = is_loopback(config.host) and is_loopback(urlsplit(url).hostname or "")
    if config.security == "none" or (config.security == "auto" and local):
        return None
    path = _named(config)
    try:
        server_public, secret = _read(path, _CLIENT)
        if path.stat().st_mode & 0o077:
            log.warning("broker.key_file = %s can be read by others: chmod 600 it", path)
    except OSError as error:
        raise BrokerError(
            f"no key for the broker at {url}: broker.key_file = {path}: {error.strerror}; copy the broker's there"
            " (broker.key in its run folder) or, if it has none, set broker.security = none"
        ) from error
    return ClientKeys(server_public=server_public, secret=secret)


def _named(config: BrokerConfig) -> Path:
    if not config.key_file:
        raise BrokerError("a broker with keys needs a file to keep them: set broker.key_file")
    return Path(config.key_file)


def _write(path: Path, names: tuple[str, ...], keys: tuple[bytes, ...]) -> None:
    """Whole or not at all, and at no time readable by others."""
    text = f"# {_NOTE[names]}\n" + "".join(f"{name} {key.decode()}\n" for name, key in zip(names, keys, strict=True))
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def _read(path: Path, names: tuple[str, ...]) -> list[bytes]:
    """The keys of these names. Raises OSError, or BrokerError that says nothing of what is in the file."""
    found: dict[str, bytes] = {}
    for line in path.read_bytes().splitlines():
        name, _, key = line.strip().partition(b" ")
        found[name.decode("utf-8", "replace")] = key.strip()
    keys = [found.get(name, b"") for name in names]
    if not all(_is_key(key) for key in keys):
        raise BrokerError(f"broker.key_file: {path} is not a key file of a broker (it needs {' and '.join(names)})")
    return keys


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False
