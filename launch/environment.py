"""The only place that reads environment variables: what a process of a run learns from whoever started it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from broker.config import BrokerConfig
from broker.lifetime import die_with
from configs.load import ConfigError, load
from configs.run import RunConfig
from generators.vllm_env import vllm_environment
from launch.signals import SignalWatch

BROKER_URL = "SLIPSTREAM_BROKER_URL"  # may hold a password: never in argv, where `ps` shows it to everyone
PARENT = "SLIPSTREAM_PARENT"  # process id of the launcher; set: die with it
READY_FD = "SLIPSTREAM_READY_FD"  # where the broker writes its url
QUIET = {  # progress bars and warnings about other people's code; nothing that a log needs
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "TOKENIZERS_PARALLELISM": "false",
}
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
    told = any(override.startswith("broker.url=") for override in args.overrides)
    written = url_file(config)
    found = (config.broker.url if told else "") or os.environ.get(BROKER_URL, "") or config.broker.url
    if not found and written.is_file():
        found = written.read_text(encoding="utf-8").strip()
    if not found:
        raise ConfigError(f"broker.url is empty: give broker.url=tcp://HOST:PORT, or set {BROKER_URL}")
    return found


def placed(config: RunConfig) -> BrokerConfig:
    """The broker's settings; its keys' namespace and its folder follow from the run's names unless they are set."""
    namespace = config.broker.namespace or f"{config.project}/{config.experiment}"
    data_dir = config.broker.data_dir or f"{config.run_dir}/broker"
    return config.broker.model_copy(update={"namespace": namespace, "data_dir": data_dir})


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
