"""``slipstream generator``: one generator process, which joins a run at any time and leaves at any time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from broker.connect import connect
from broker.errors import RunFinished
from configs.run import RunConfig
from generators.engine import Engine
from launch import environment
from launch.signals import on_stop, raise_stopped
from tasks.model import prepare_model


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the run has finished, 130 or 143 after a signal; errors end the process."""
    config = environment.enter(args, args.id or "generator")
    on_stop(raise_stopped)  # until the event loop is there to be asked nicely
    url = environment.broker_url(args, config)
    environment.apply(environment.engine_environment(config))
    member_id = args.id or f"{socket.gethostname()}-{os.getpid()}"
    return asyncio.run(_generate(config, url, member_id))


async def _generate(config: RunConfig, url: str, member_id: str) -> int:
    from generators.loop import generate  # with the engine, what takes seconds to import
    from generators.rewards import Scorer

    stop, codes, loop = asyncio.Event(), [0], asyncio.get_running_loop()

    def act(signum: int) -> None:
        codes[0] = 128 + signum
        loop.call_soon_threadsafe(stop.set)

    engine = build_engine(config)
    on_stop(act)
    broker_config = environment.placed(config)
    with contextlib.suppress(RunFinished):
        await generate(
            broker=lambda: connect(broker_config, url),
            engine=engine,
            score=Scorer(config.task, timeout_s=config.generator.reward_timeout_s),
            config=config.generator,
            broker_config=broker_config,
            member_id=member_id,
            stop=stop,
        )
    return codes[0]


def build_engine(config: RunConfig) -> Engine:
    """The engine that the configuration names, not yet started, with the run's model."""
    model = prepare_model(config.model, Path(config.run_dir) / "model", config.seed)
    return _engine_class(config.generator.engine)(
        model_path=str(model),
        rollout=config.rollout,
        config=config.generator,
        sync=config.weights_sync,
        dtype=config.model.dtype,
        seed=config.seed,
    )


def _engine_class(name: str) -> Callable[..., Engine]:
    if name == "vllm":
        from generators.vllm_engine import VllmEngine

        return VllmEngine
    from generators.hf_engine import HfEngine

    return HfEngine
