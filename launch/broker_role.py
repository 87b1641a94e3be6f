"""``slipstream broker``: the run's broker, until a signal ends it."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from broker.address import without_password
from broker.keys import key_file
from broker.serve import serve
from launch.environment import enter, placed, ready_fd, url_file


def run(args: argparse.Namespace) -> int:
    """Serves; the url goes to the launcher, or to a file that only its owner can read."""
    config, watch = enter(args, "broker")
    stop = threading.Event()
    watch.act = lambda signum: stop.set()
    announced, settings = url_file(config), placed(config)
    try:
        serve(settings, ready=lambda url: _announce(url, announced, key_file=key_file(settings)), stop=stop)
    finally:
        announced.unlink(missing_ok=True)
    return 128 + watch.signum if watch.signum else 0


def _announce(url: str, announced: Path, *, key_file: Path | None) -> None:
    announced.parent.mkdir(parents=True, exist_ok=True)
    announced.unlink(missing_ok=True)
    with os.fdopen(os.open(announced, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(url + "\n")
    more = f"; key for clients: {key_file}" if key_file else ""
    print(f"broker ready: {without_password(url)} (whole url: {announced}{more})", flush=True)
    if (descriptor := ready_fd()) is not None:
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(url + "\n")
