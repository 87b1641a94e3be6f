"""``slipstream generator``: one generator process, which joins a run at any time and leaves at any time."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from broker.connect import Access
from configs.run import RunConfig
from generators.engine import Engine
from launch import environment
from launch.preflight import check_access, check_generator
from launch.signals import SignalWatch
from tasks.model import load_tokenizer, prepare_model


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the run has finished, 130 or 143 after a signal; errors end the process."""
    config, watch = environment.enter(args, args.id or "generator")
    url = environment.broker_url(args, config)
    check_generator(config)
    check_access(environment.placed(config), url)
    environment.apply(environment.engine_environment(config))
    member_id = args.id or f"{socket.gethostname()}-{os.getpid()}"
    return asyncio.run(_generate(config, url, member_id, watch))


async def _generate(config: RunConfig, url: str, member_id: str, watch: SignalWatch) -> int:
    from generators.groups import decoder  # with the engine, what takes seconds to import
    from generators.loop import generate
    from generators.scoring import Scorer

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    model, broker_config = model_directory(config), environment.placed(config)
    engine = build_engine(config, model, Access(config=broker_config, url=url))

    def leave(signum: int) -> None:
        loop.call_soon_threadsafe(stop.set)

    watch.act = leave
    await generate(
        broker=Access(config=broker_config, url=url),
        engine=engine,
        score=Scorer(config.task, timeout_s=config.generator.reward_timeout_s),
        decode=decoder(load_tokenizer(model)),
        config=config.generator,
        broker_config=broker_config,
        group_timeout_s=config.rollout.group_timeout_s,
        member_id=member_id,
        stop=stop,
        drain=config.weights_sync.on_update == "drain",
        grace_s=config.weights_sync.grace_s,
    )
    if watch.signum:
        # It has left the run and everything is closed. An engine that was still loading sits in a thread, for which
        # the interpreter would wait longer than a stop may take, and vLLM's core, while it still imports, does not
        # yet watch its parent.
        for child in psutil.Process().children(recursive=True):
            child.kill()
        logging.shutdown()
        os._exit(128 + watch.signum)
    return 0


def model_directory(config: RunConfig) -> Path:
    """The run's initial model, made in the run's folder if it has to be made."""
    return prepare_model(config.model, Path(config.run_dir) / "model", config.seed)


def build_engine(config: RunConfig, model: Path, broker: Access) -> Engine:
    """The engine that the configuration names, not yet started."""
    engine = _engine_class(config.generator.engine)(
        model_path=str(model),
        rollout=config.rollout,
        config=config.generator,
        sync=environment.synced(config),
        dtype=config.model.dtype,
        seed=config.seed,
        broker=broker,
    )
    if not config.generator.completion_delay_s:
        return engine
    from generators.delayed import DelayedEngine

    return DelayedEngine(
        engine, median_s=config.generator.completion_delay_s, sigma=config.generator.completion_delay_sigma
    )


def _engine_class(name: str) -> Callable[..., Engine]:
    if name == "vllm":
        from generators.vllm_engine import VllmEngine

        return VllmEngine
    from generators.hf_engine import HfEngine

    return HfEngine
