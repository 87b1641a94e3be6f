"""``slipstream broker``: the run's broker, until a signal ends it."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from broker.serve import serve
from configs.show import without_password
from launch.environment import enter, placed, ready_fd, url_file
from launch.signals import on_stop


def run(args: argparse.Namespace) -> int:
    """Serves; the url goes to the launcher, or to a file that only its owner can read."""
    config = enter(args, "broker")
    stop, codes = threading.Event(), [0]

    def act(signum: int) -> None:
        codes[0] = 128 + signum
        # From a thread: the handler may have interrupted this very thread inside the event's own lock.
        threading.Thread(target=stop.set).start()

    on_stop(act)
    announced = url_file(config)
    try:
        serve(placed(config), ready=lambda url: _announce(url, announced), stop=stop)
    finally:
        announced.unlink(missing_ok=True)
    return codes[0]


def _announce(url: str, announced: Path) -> None:
    announced.parent.mkdir(parents=True, exist_ok=True)
    announced.unlink(missing_ok=True)
    with os.fdopen(os.open(announced, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(url + "\n")
    print(f"broker ready: {without_password(url)} (whole url: {announced})", flush=True)
    if (descriptor := ready_fd()) is not None:
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(url + "\n")
