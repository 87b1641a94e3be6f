"""``slipstream learner``: the learner's ranks on this machine.

Started by a person or by the launcher it is the parent of ``learner.ranks`` processes of itself, which it tells
their rank as torchrun does. Started by torchrun, or by that parent, it is one rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker.connect import connect
from broker.errors import BrokerError
from configs.run import RunConfig
from launch import environment
from launch.children import Children
from launch.generator_role import model_directory
from launch.preflight import check_access, check_learner
from launch.resumption import Standing, completed, going_on, standing
from launch.run_folder import LEARNER, claim, draw, keep_config
from launch.step_lines import SHOWN, StepLines, silent
from learners import lineage
from tasks.model import load_tokenizer
from tasks.prompts import PromptFeed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from learners.conductor import Show

log = logging.getLogger(__name__)

_TELL_S = 5.0  # for a broker to hear that there is nothing to do
_FIRST_ERROR_S = 2.0  # after one rank failed the others wait for it in a collective; nothing good comes of that


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the first rank that failed, or 0 when all have finished."""
    return _rank(args) if "RANK" in os.environ else _ranks(args)


def _ranks(args: argparse.Namespace) -> int:
    config, _ = environment.enter(args, "learner")
    url = environment.broker_url(args, config)
    if (found := standing(config)).complete:
        return _complete(config, url, found)
    check_learner(config)
    check_access(environment.placed(config), url)
    with (
        # Bound here and handed down: a port that is probed and bound later can be taken in between.
        socket.create_server(("127.0.0.1", 0)) as listener,
        Children(config.launch.stop_timeout_s - 1.0) as children,
    ):
        for rank in range(config.learner.ranks):
            more = {environment.STORE_FD: str(listener.fileno())} if rank == 0 else {}
            env = environment.child(
                **{environment.BROKER_URL: url},
                **more,
                **_rank_variables(rank, config.learner.ranks, listener.getsockname()[1]),
                OMP_NUM_THREADS=str(config.learner.threads),
            )
            fds = (listener.fileno(),) if rank == 0 else ()
            children.start(f"rank{rank}", _command(args), env=env, own_group=False, pass_fds=fds)
        while children.running():
            ended = children.wait(3600.0)
            if ended is not None and ended.exit_code:
                print(f"learner {ended.name} ended with exit code {ended.exit_code}", file=sys.stderr, flush=True)
                children.stop(timeout_s=_FIRST_ERROR_S)
                return ended.exit_code
    return 0


def _complete(config: RunConfig, url: str, found: Standing) -> int:
    """Says so, and tells the broker, so that generators which wait there for a learner end as well."""
    print(f"slipstream: {completed(config, found)}", file=sys.stderr, flush=True)
    kept, settings = lineage.read(Path(config.run_dir)), environment.placed(config)
    patience = min(settings.reconnect_timeout_s, _TELL_S)
    client = connect(settings.model_copy(update={"reconnect_timeout_s": patience}), url)
    try:
        rules = client.state().rules
        if rules is None or (kept is not None and rules.run == kept.run):
            client.finish("the run was complete before it was started")
        else:
            log.warning("the broker serves another run, which is left alone")
    except BrokerError as error:  # there is nobody to tell
        log.warning("the broker was not told: %s: %s", type(error).__name__, error)
    finally:
        client.close()
    return 0


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set, for one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _command(args: argparse.Namespace) -> list[str]:
    overrides = [text for text in args.overrides if not text.startswith("broker.url=")]  # in the environment
    return [sys.executable, "-P", "-m", "launch.cli", "learner", "-c", args.config, *overrides]


def _rank(args: argparse.Namespace) -> int:
    rank = int(os.environ["RANK"])
    # A rank has no children, its checkpoints are complete or absent, and its metrics are flushed line by line: it is as
    # good after SIGKILL, and any other way out leads through collectives that wait for the other ranks.
    config, _ = environment.enter(args, f"learner[{rank}]", parent_signal=signal.SIGKILL)
    url = environment.broker_url(args, config)
    if (found := standing(config)).complete:  # started by torchrun, or the parent had seen it
        return _complete(config, url, found) if rank == 0 else 0
    if rank == 0:  # it alone writes metrics and checkpoints, and it may outlive its parent for a moment
        claim(Path(config.run_dir), LEARNER)
    environment.apply(environment.QUIET | {"DS_ACCELERATOR": config.learner.device})
    from learners.run import run_rank  # torch and DeepSpeed: what takes seconds to import

    model, broker_config = model_directory(config), environment.placed(config)
    prompts = cache(partial(_prompts, config, model))
    if rank == 0:
        prompts()  # what is wrong with them is told before a model is loaded
    if rank == 0 and Path(args.config) != Path(config.run_dir) / "config.yaml":  # that one is the launcher's
        for line in going_on(config, found):
            log.info("%s", line)
        keep_config(config)
    run_rank(
        model_dir=model,
        run_dir=Path(config.run_dir),
        rollout=config.rollout,
        algorithm=config.algorithm,
        config=config.learner,
        weights_sync=environment.synced(config),
        broker_config=broker_config,
        broker=lambda: connect(broker_config, url),
        prompts=prompts,
        rank=rank,
        world=int(os.environ["WORLD_SIZE"]),
        store=_store(rank, config.learner.collective_timeout_s),
        seed=config.seed,
        watchdog_s=config.launch.watchdog_s,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        attention=config.model.attention,
        show=_steps(config),
    )
    if rank == 0:
        draw(config)
    return 0


def _prompts(config: RunConfig, model: Path) -> PromptFeed:
    return PromptFeed(
        task=config.task,
        rollout=config.rollout,
        tokenizer=load_tokenizer(model),
        seed=config.seed,
        max_eval_prompts=config.learner.eval.max_prompts,
    )


def _steps(config: RunConfig) -> Show:
    """What tells the steps: nobody beside a launcher, which does so itself."""
    return silent if os.environ.get(SHOWN) else StepLines(config, tell=lambda line: log.info("%s", line))


def _store(rank: int, timeout_s: float) -> Store:
    """The ranks' rendezvous: on the socket that the parent has bound, or torchrun's own."""
    from torch._C._distributed_c10d import TCPStore

    listener = os.environ.get(environment.STORE_FD)
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun's agent is the host
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0 and not elastic,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=int(listener) if listener else None,
    )
