"""The broker as a role of its own: the ZeroMQ server in this process, or a Redis server beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from broker.config import BrokerConfig
from broker.errors import BrokerError
from broker.redis_server import RedisServer
from broker.server import BrokerServer


def serve(config: BrokerConfig, *, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Serves until ``stop`` is set. ``ready`` gets the url to connect to, for Redis with its password.

    Raises BrokerError when the address is taken, or when the Redis server ends by itself.
    """
    if config.backend == "zmq":
        server = BrokerServer(config)
        try:
            ready(server.url)
            server.run(stop)
        finally:
            server.close()
    else:
        _serve_redis(config, ready=ready, stop=stop)


def _serve_redis(config: BrokerConfig, *, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Waits for ``stop``; the death of the server sets it too, from the thread that waits for that."""
    server, ended = RedisServer(config), threading.Event()

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
            raise BrokerError("the Redis server of this run has ended by itself")
    finally:
        server.stop()
