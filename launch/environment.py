"""The only place that reads environment variables: what a process of a run learns from whoever started it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from broker.address import BACKENDS, check_url, without_password
from broker.config import BrokerConfig
from broker.lifetime import die_with
from configs.load import ConfigError, load
from configs.run import RunConfig
from generators.vllm_env import vllm_environment
from launch.signals import SignalWatch
from weights_sync.config import WeightsSyncConfig

BROKER_URL = "SLIPSTREAM_BROKER_URL"  # may hold a password: never in argv, where `ps` shows it to everyone
PARENT = "SLIPSTREAM_PARENT"  # process id of the launcher; set: die with it
READY_FD = "SLIPSTREAM_READY_FD"  # where the broker writes its url
QUIET = {  # progress bars and warnings about other people's code; nothing that a log needs
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "TOKENIZERS_PARALLELISM": "false",
}
_ASKING_S = 5.0
STORE_FD = "SLIPSTREAM_STORE_FD"  # listening socket of the ranks' store, bound by the parent


def enter(
    args: argparse.Namespace, role: str, *, parent_signal: signal.Signals = signal.SIGTERM
) -> tuple[RunConfig, SignalWatch]:
    """What every role does first: configuration, the leash to its parent, signals, logging."""
    config = load(args.config, args.overrides)
    if parent := os.environ.get(PARENT):
        die_with(int(parent), parent_signal)
    watch = SignalWatch(config.launch.stop_timeout_s)
    logging.basicConfig(
        stream=sys.stderr,
        level=config.telemetry.log_level.upper(),
        format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    return config, watch


def broker_url(args: argparse.Namespace, config: RunConfig) -> str:
    """Where the run's broker is. Raises ConfigError that says how to tell.

    The command line wins, then the environment (the launcher's word, with the password), then the file, then the
    url that a broker of the same run wrote on this machine.
    """
    written = url_file(config)
    found = given_url(args, config)
    if not found and written.is_file():
        found = _checked(written.read_text(encoding="utf-8").strip(), str(written))
    if not found:
        raise ConfigError(
            f"broker.url is empty, and there is no broker.url in {config.run_dir}: is the broker running? If it is on "
            f"another machine, give broker.url=tcp://HOST:PORT, or set {BROKER_URL}"
        )
    return found


def given_url(args: argparse.Namespace, config: RunConfig) -> str:
    """The url of a broker that is there, if one was named: on the command line, in the environment, in the file."""
    told = any(override.startswith("broker.url=") for override in args.overrides)
    if told and config.broker.url:
        return config.broker.url
    return _checked(os.environ.get(BROKER_URL, ""), BROKER_URL) or config.broker.url


def told(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """The configuration with the url of ``given_url``, for a launcher, which starts no broker beside that one."""
    url = given_url(args, config)
    if url == config.broker.url:
        return config
    backend = BACKENDS[url.partition(":")[0]]
    return config.model_copy(update={"broker": config.broker.model_copy(update={"url": url, "backend": backend})})


def _checked(url: str, source: str) -> str:
    try:
        if url:
            check_url(url)
    except ValueError as error:
        raise ConfigError(f"{source}={without_password(url)}: {error}") from error
    return url


def placed(config: RunConfig) -> BrokerConfig:
    """The broker's settings; namespace, folder and key file follow from the run's names unless they are set."""
    namespace = config.broker.namespace or f"{config.project}/{config.experiment}"
    data_dir = config.broker.data_dir or f"{config.run_dir}/broker"
    key_file = config.broker.key_file or f"{config.run_dir}/broker.key"
    return config.broker.model_copy(update={"namespace": namespace, "data_dir": data_dir, "key_file": key_file})


def synced(config: RunConfig) -> WeightsSyncConfig:
    """The settings of weight sync; with transport=disk the folder is in the run's own unless it is set, and made."""
    settings = config.weights_sync
    if settings.transport != "disk" or settings.dir:
        return settings
    folder = Path(config.run_dir, "weights").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return settings.model_copy(update={"dir": str(folder)})


def asking(args: argparse.Namespace, config: RunConfig) -> BrokerConfig:
    """The same for a command that only asks: a person waits for it, so not for long unless told on its command line."""
    settings = placed(config)
    if any(override.startswith("broker.reconnect_timeout_s=") for override in args.overrides):
        return settings
    return settings.model_copy(update={"reconnect_timeout_s": min(_ASKING_S, settings.reconnect_timeout_s)})


def url_file(config: RunConfig) -> Path:
    """Where a broker of this run writes its url, readable by its owner alone."""
    return Path(config.run_dir) / "broker.url"


def ready_fd() -> int | None:
    """The descriptor that the launcher reads the broker's url from."""
    value = os.environ.get(READY_FD)
    return int(value) if value else None


def child(**more: str) -> dict[str, str]:
    """The environment of a child that dies with this process."""
    return {**QUIET, **os.environ, PARENT: str(os.getpid()), **more}


def engine_environment(config: RunConfig) -> dict[str, str]:
    """What the engines must find when they are imported."""
    return QUIET | vllm_environment(config.generator)


def apply(settings: Mapping[str, str]) -> None:
    """Sets what a library reads from its environment when it is imported.

    What the user has set stays, but for the number of threads, which has a setting of its own.
    """
    for name, value in settings.items():
        if name == "OMP_NUM_THREADS":
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
