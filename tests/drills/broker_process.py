"""The broker under drill, at the address it always had: ``python -m tests.drills.broker_process DIRECTORY``."""

from __future__ import annotations

import threading

from broker.redis_server import RedisServer
from broker.serve import serve
from tests.drills.setting import Setting, enter


def main() -> None:
    setting = enter()
    if setting.broker["backend"] == "redis":
        # serve() makes a new password at every start, and with it another url; the server itself takes the old one.
        server = RedisServer(setting.config(), password=setting.password)
        _ready(setting, server.url)
        raise SystemExit(f"the Redis server has ended by itself with {server.wait()}")
    serve(setting.config(), ready=lambda url: _ready(setting, url), stop=threading.Event())


def _ready(setting: Setting, url: str) -> None:
    if url != setting.url:
        raise SystemExit(f"the broker is at {url} now; it was at {setting.url}")
    print("ready", flush=True)


if __name__ == "__main__":
    main()
