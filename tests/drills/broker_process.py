"""The broker under drill, at the address it always had: ``python -m tests.drills.broker_process DIRECTORY``."""

from __future__ import annotations

import threading

from broker.redis_server import RedisServer
from broker.serve import serve
from tests.drills.setting import Setting, enter


def main() -> None:
    setting = enter()
    if setting.broker["backend"] == "redis" and not setting.disk:
        # serve() makes a new password, and with it another url, when there is no data_dir to keep it in.
        server = RedisServer(setting.config(), password=setting.password)
        _ready(setting, server.url)
        raise SystemExit(f"the Redis server has ended by itself with {server.wait()}")
    serve(setting.config(), ready=lambda url: _ready(setting, url), stop=threading.Event())


def _ready(setting: Setting, url: str) -> None:
    if not setting.url_file.exists():
        part = setting.url_file.with_suffix(".part")
        part.write_text(url, encoding="utf-8")
        part.rename(setting.url_file)
    if url != setting.url:
        raise SystemExit("the broker has come back at another url")
    print("ready", flush=True)


if __name__ == "__main__":
    main()
