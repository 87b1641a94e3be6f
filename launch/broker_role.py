"""``slipstream broker``: the run's broker, until a signal ends it."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from broker.address import without_password
from broker.keys import key_file
from broker.serve import serve
from configs.load import ConfigError
from launch.environment import BROKER_URL, enter, given_url, placed, ready_fd, url_file
from launch.run_folder import BROKER, claim


def run(args: argparse.Namespace) -> int:
    """Serves; the url goes to the launcher, or to a file that only its owner can read."""
    config, watch = enter(args, "broker")
    if given_url(args, config):
        raise ConfigError(
            f"broker.url names an existing broker; `slipstream broker` starts one: unset it (and {BROKER_URL})"
        )
    claim(Path(config.run_dir), BROKER)
    stop = threading.Event()
    watch.act = lambda signum: stop.set()
    announced, settings, told = url_file(config), placed(config), list[str]()

    def ready(url: str) -> None:
        told.append(url)
        _announce(url, announced, key_file=key_file(settings))

    try:
        serve(settings, ready=ready, stop=stop)
    finally:
        if told and _written(announced) == told[0]:
            announced.unlink(missing_ok=True)
    return 128 + watch.signum if watch.signum else 0


def _written(announced: Path) -> str:
    return announced.read_text(encoding="utf-8").strip() if announced.is_file() else ""


def _announce(url: str, announced: Path, *, key_file: Path | None) -> None:
    new = announced.with_name(f"{announced.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(url + "\n")
    new.replace(announced)
    more = f"; key for clients: {key_file}" if key_file else ""
    print(f"broker ready: {without_password(url)} (whole url: {announced}{more})", flush=True)
    if (descriptor := ready_fd()) is not None:
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(url + "\n")
