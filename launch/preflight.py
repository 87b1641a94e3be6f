"""What can be known to be wrong before anything is started. Each check raises ConfigError or TaskError, exit code 2."""

from __future__ import annotations

import logging
import os
from ctypes.util import find_library
from pathlib import Path

from broker.address import unknown_host
from broker.config import BrokerConfig
from broker.keys import client_keys
from broker.messages import Split
from configs.load import ConfigError
from configs.run import RunConfig
from generators.scoring import Scorer
from learners.checkpoint import MARKER, Checkpoints
from learners.config import AlgorithmConfig, LearnerConfig
from tasks.config import TaskConfig
from tasks.loading import TaskError, described, load_function
from tasks.model import check_model
from tasks.prompts import load_items

log = logging.getLogger(__name__)


def check_run(config: RunConfig) -> None:
    """Everything, for a launcher whose roles are all on this machine."""
    check_resume(config)
    check_offload(config.learner)
    check_algorithm(config.algorithm)
    check_prompts(config)
    check_engine(config)
    check_rewards(config.task, timeout_s=config.generator.reward_timeout_s)
    check_model(config.model)


def check_learner(config: RunConfig) -> None:
    """What a learner needs on its machine. Its first rank calls the prompts function, before it loads a model."""
    check_resume(config)
    check_offload(config.learner)
    check_algorithm(config.algorithm)
    _importable(config.task.prompts, "task.prompts")
    check_model(config.model)


def check_generator(config: RunConfig) -> None:
    """What a generator needs on its machine."""
    check_engine(config)
    check_rewards(config.task, timeout_s=config.generator.reward_timeout_s)
    check_model(config.model)


def check_access(config: BrokerConfig, url: str) -> None:
    """The keys or the TLS files for the broker at ``url`` can be read. Raises BrokerError that names the setting.

    A host without an address is told and no error: a role may be started before its broker's name is known.
    """
    if url.startswith("tcp:"):
        client_keys(config, url)
    else:
        from broker.redis_connection import open_redis  # the redis client is only needed here

        open_redis(url).close()
    if unknown := unknown_host(url):
        log.warning("%s; waiting for that, up to broker.reconnect_timeout_s = %g", unknown, config.reconnect_timeout_s)


def check_engine(config: RunConfig) -> None:
    """On a CPU each of vLLM's workers has a core of its own."""
    workers, cores = config.generator.tensor_parallel_size, len(os.sched_getaffinity(0))
    if config.generator.device == "cpu" and workers > cores:
        raise ConfigError(
            f"generator.tensor_parallel_size={workers}: on generator.device=cpu each worker has a core of its own, and "
            f"this process may use {cores}"
        )


def check_resume(config: RunConfig) -> None:
    """``learner.checkpoint.resume`` is ``auto``, ``never``, or a complete checkpoint."""
    resume, folder = config.learner.checkpoint.resume, Path(config.run_dir) / "checkpoints"
    if resume in ("auto", "never") or (Path(resume).expanduser() / MARKER).is_file():
        return
    newest = Checkpoints(folder, keep=1).newest()
    offered = f"the newest of this run is {newest}" if newest else f"there is none in {folder}"
    raise ConfigError(
        f"learner.checkpoint.resume={resume}: expected auto, never, or the directory of a complete checkpoint, "
        f"which holds {MARKER}; {offered}"
    )


def check_offload(config: LearnerConfig) -> None:
    """What ``learner.offload_optimizer=nvme`` needs: libaio, and a folder to write in."""
    if config.offload_optimizer != "nvme":
        return
    if find_library("aio") is None:
        raise ConfigError(
            "learner.offload_optimizer=nvme needs libaio, which is not installed (packages libaio1 and libaio-dev, or "
            "libaio-devel); learner.offload_optimizer=cpu needs none"
        )
    folder = Path(config.offload_dir).expanduser()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"learner.offload_dir={config.offload_dir}: expected a folder that can be written in")


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """The functions of the user's own that it names are there."""
    named = {name: getattr(algorithm, name) for name in ("advantage", "loss", "loss_mean")}
    for setting, reference in {**named, "correction.kind": algorithm.correction.kind}.items():
        if ":" in reference:
            _importable(reference, f"algorithm.{setting}")


def check_prompts(config: RunConfig) -> None:
    """The prompts function gives items for training, and for evaluation where there is one."""
    evaluation = config.learner.eval
    evaluates = evaluation.at_start or evaluation.at_end or evaluation.every_steps > 0
    for split in (Split.TRAIN, Split.EVAL) if evaluates else (Split.TRAIN,):
        if not load_items(config.task, split, config.seed):
            raise TaskError(f"task.prompts={config.task.prompts}: gives no prompt for the split {str(split)!r}")


def check_rewards(task: TaskConfig, *, timeout_s: float) -> Scorer:
    """The scorer of the rewards, none of which has been called."""
    for name, reference in task.rewards.items():
        _importable(reference, f"task.rewards.{name}")
    return Scorer(task, timeout_s=timeout_s)


def _importable(reference: str, setting: str) -> None:
    try:
        load_function(reference, setting=setting)
    except TaskError:
        raise
    except Exception as error:  # their module, which may raise anything while it is imported
        raise TaskError(f"{setting}={reference}: {described(error, caller=__file__)}") from error
