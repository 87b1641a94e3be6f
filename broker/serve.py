"""The broker as a role of its own: the ZeroMQ server in this process, or a Redis server beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from broker.config import BrokerConfig
from broker.errors import BrokerError
from broker.redis_server import RedisServer
from broker.server import BrokerServer
from broker.store import Store


def serve(config: BrokerConfig, *, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Serves until ``stop`` is set. ``ready`` gets the url to connect to, for Redis with its password.

    Raises BrokerError when the address is taken, when the state on disk cannot be used or written, or when the Redis
    server ends by itself.
    """
    if config.backend == "zmq":
        server = BrokerServer(config, store=Store(data_dir(config)) if config.durability == "disk" else None)
        try:
            ready(server.url)
            server.run(stop)
        finally:
            server.close()
    else:
        _serve_redis(config, ready=ready, stop=stop)


def data_dir(config: BrokerConfig) -> Path:
    """Where the state is kept. Raises BrokerError when that was not said."""
    if not config.data_dir:
        raise BrokerError("broker.durability = disk needs a folder: set broker.data_dir")
    return Path(config.data_dir)


def _serve_redis(config: BrokerConfig, *, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Waits for ``stop``; the death of the server sets it too, from the thread that waits for that."""
    folder = data_dir(config) if config.durability == "disk" else None
    server, ended = RedisServer(config, data_dir=folder), threading.Event()

    def watch() -> None:
        server.wait()
        ended.set()
        stop.set()

    watcher = threading.Thread(target=watch, name="redis-watch", daemon=True)
    try:
        ready(server.url)
        watcher.start()
        stop.wait()
        if ended.is_set():
            kept = f" (broker.data_dir = {folder})" if folder else ""
            raise BrokerError(
                f"the Redis server of this run has ended by itself, with exit status {server.wait()}{kept}; its last "
                f"lines:\n{server.last_words()}"
            )
    finally:
        server.stop()
