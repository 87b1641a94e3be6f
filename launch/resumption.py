"""Where the run in a folder stands, and what is said of it before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.address import without_password
from configs.load import ConfigError, load
from configs.run import RunConfig
from launch.preflight import check_resume
from learners.checkpoint import MARKER, CheckpointDamaged, Checkpoints, read_checkpoint

_NOT_WORTH_SAYING = ("learner.checkpoint.resume",)  # how to start, and nothing about what is trained


@dataclass(frozen=True, kw_only=True)
class Standing:
    """``version``: of the ``checkpoint`` that the run goes on from, 0 without one. ``complete``: nothing is left."""

    checkpoint: Path | None
    version: int
    complete: bool


def standing(config: RunConfig) -> Standing:
    """Reads the run's folder and changes nothing.

    Raises ConfigError when the checkpoint lacks something, or is beyond the run's end: nobody can tell whether a
    shorter run or another one is meant.

    A run is complete when its newest checkpoint has all the steps and ``actor/`` was exported after it: one that died
    in between still has that to do.
    """
    check_resume(config)
    run_dir, settings = Path(config.run_dir), config.learner.checkpoint
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=settings.keep)
    try:
        checkpoint, newest = checkpoints.resolve(settings.resume), checkpoints.newest()
        version, _ = read_checkpoint(checkpoint) if checkpoint else (0, None)
    except CheckpointDamaged as error:  # for a person to decide: trying again does not help
        raise ConfigError(str(error)) from error
    if checkpoint is None:
        return Standing(checkpoint=None, version=0, complete=False)
    if version > config.learner.total_steps:
        raise ConfigError(
            f"learner.total_steps={config.learner.total_steps}: {checkpoint} is of step {version} already; raise "
            "it, set learner.checkpoint.resume to an earlier checkpoint or to never, or choose another experiment=NAME"
        )
    exported, marker = run_dir / "actor" / "config.json", checkpoint / MARKER
    complete = (
        version == config.learner.total_steps
        and newest is not None
        and newest.resolve() == checkpoint.resolve()
        and exported.is_file()
        and exported.stat().st_mtime_ns >= marker.stat().st_mtime_ns
    )
    return Standing(checkpoint=checkpoint, version=version, complete=complete)


def completed(config: RunConfig, found: Standing) -> str:
    """What a person who starts a complete run is told."""
    return (
        f"{config.run_dir} is complete at {found.version} of {config.learner.total_steps} steps, nothing is started; "
        f"to train on: learner.total_steps=N with N above {found.version}; "
        "to start anew: learner.checkpoint.resume=never or another experiment=NAME"
    )


def going_on(config: RunConfig, found: Standing) -> list[str]:
    """What a person is told of a run that goes on: from where, and which settings are others than they were."""
    if found.checkpoint is None:
        return []
    first = f"going on from step {found.version} of {config.learner.total_steps} ({found.checkpoint})"
    return [first, *(f"changed since: {text}" for text in _changes(config))]


def _changes(config: RunConfig) -> Iterator[str]:
    """``key: before -> now`` for every setting that is not as in the folder's ``config.yaml``."""
    file = Path(config.run_dir) / "config.yaml"
    if not file.is_file():
        return
    try:
        before = _flat(load(file))
    except ConfigError as error:
        yield f"unknown, as {file} cannot be read any more ({' '.join(str(error).split())})"
        return
    now = _flat(config)
    for key in dict.fromkeys([*before, *now]):
        if key not in _NOT_WORTH_SAYING and before.get(key) != now.get(key):
            yield f"{key}: {_shown(before, key)} -> {_shown(now, key)}"


def _shown(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "not set"


def _flat(config: RunConfig) -> dict[str, object]:
    """Every setting under its dotted key; a broker's url as ``config.yaml`` has it, without its password."""
    broker = config.broker.model_copy(update={"url": without_password(config.broker.url)})
    return dict(_leaves("", config.model_copy(update={"broker": broker}).model_dump(mode="json")))


def _leaves(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value
