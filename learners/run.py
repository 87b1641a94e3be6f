"""One rank of the learner, from process groups to the last export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from broker.config import BrokerConfig, RolloutConfig
from broker.contract import Broker
from broker.messages import Frontier, Prompt, Rules
from learners.checkpoint import Checkpoints, read_checkpoint
from learners.conductor import Conductor, Feed, Publishing, Show, read_introduction
from learners.config import AlgorithmConfig, LearnerConfig
from learners.evaluation import Evaluation
from learners.exchange import Exchange
from learners.feed import BatchFeed
from learners.lineage import keep, take_up
from learners.loop import learn
from learners.packing import packs
from learners.policy import Policy
from learners.saving import Saver
from learners.schedule import learning_rate
from telemetry.sink import JsonlSink
from weights_sync.config import WeightsSyncConfig
from weights_sync.part_sender import PartSender
from weights_sync.publisher import Publisher
from weights_sync.staging import declare

log = logging.getLogger(__name__)


class Prompts(Protocol):
    """What tasks.prompts.PromptFeed offers."""

    def from_frontier(self, frontier: Frontier) -> Iterator[Prompt]:
        """The training prompts after a data position."""

    def eval_prompts(self, version: int) -> Sequence[Prompt]:
        """The evaluation round of a version."""


@dataclass(frozen=True, kw_only=True)
class RootParts:
    """What only rank 0 needs, but for its broker: with transport=relay every rank sends through it.

    Attributes:
        broker: opens a broker client; called once per thread that needs one.
        prompts: makes the run's prompts.
        open_feed, open_publisher: with the arguments of BatchFeed and Publisher; the serial mode has its own.
        show: see Conductor.
    """

    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    config: LearnerConfig
    weights_sync: WeightsSyncConfig
    broker_config: BrokerConfig
    broker: Callable[[], Broker]
    prompts: Callable[[], Prompts]
    watchdog_s: float
    seed: int
    run_dir: Path
    open_feed: Callable[..., Feed]
    open_publisher: Callable[..., Publishing]
    show: Show


def run_rank(
    *,
    model_dir: Path,
    run_dir: Path,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    weights_sync: WeightsSyncConfig,
    broker_config: BrokerConfig,
    broker: Callable[[], Broker],
    prompts: Callable[[], Prompts],
    rank: int,
    world: int,
    store: Store,
    seed: int,
    watchdog_s: float,
    local_rank: int = 0,
    attention: str = "sdpa",
    open_feed: Callable[..., Feed] = BatchFeed,
    open_publisher: Callable[..., Publishing] = Publisher,
    show: Show = lambda line, state: None,
) -> None:
    """Trains one rank to the end, and on rank 0 ends the run. See RootParts for what is called on rank 0 only.

    ``model_dir``: Hugging Face directory of the initial policy. ``store``: of the ranks, for torch.distributed; a
    HashStore will do for one rank.
    """
    root = RootParts(
        rollout=rollout, algorithm=algorithm, config=config, weights_sync=weights_sync, broker_config=broker_config,
        broker=broker, prompts=prompts, watchdog_s=watchdog_s, seed=seed, run_dir=run_dir, open_feed=open_feed,
        open_publisher=open_publisher, show=show,
    )  # fmt: skip
    _start_torch(config, rank=rank, world=world, local_rank=local_rank, store=store)
    barrier = dist.barrier if world > 1 else lambda: None
    try:
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep, rank=rank, barrier=barrier)
        start, frontier = _starting_point(checkpoints, config.checkpoint.resume)
        policy = Policy(
            model_dir=model_dir, config=config, algorithm=algorithm, temperature=rollout.temperature, seed=seed,
            attention=attention, rank=rank, world=world, local_rank=local_rank, resume=start,
        )  # fmt: skip
        exchange = Exchange(rank=rank, world=world, timeout_s=config.collective_timeout_s)
        with ExitStack() as stack:
            conductor = None
            if rank == 0:
                _introduce(start, policy.version, frontier, rollout=rollout, config=config)
                conductor = _conductor(stack, root, policy, frontier, ranks=world)
            introduction = exchange.share(conductor.introduction if conductor else None)
            sender = None if conductor else _sender(stack, root, policy, introduction, rank=rank, ranks=world)
            saver = Saver(checkpoints, rank=rank, barrier=barrier)
            stack.callback(saver.close)
            learn(
                policy=policy, exchange=exchange, conductor=conductor, sender=sender, saver=saver, config=config,
                rank=rank,
            )  # fmt: skip
            policy.export(run_dir / "actor")
            if conductor:
                conductor.finish()
    finally:
        dist.destroy_process_group()


def _starting_point(checkpoints: Checkpoints, resume: str) -> tuple[Path | None, Frontier]:
    """Collective. The checkpoint to go on from, and its data position; later ones are given up."""
    start = checkpoints.resolve(resume)
    version, frontier = read_checkpoint(start) if start else (-1, Frontier())
    checkpoints.set_aside_after(version)
    return start, frontier


def _start_torch(config: LearnerConfig, *, rank: int, world: int, local_rank: int, store: Store) -> None:
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        config.backend,
        store=PrefixStore("learner", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )


def _sender(
    stack: ExitStack, parts: RootParts, policy: Policy, introduction: bytes, *, rank: int, ranks: int
) -> PartSender:
    """On another rank than 0, what sends its part of the weights."""
    address, incarnation = read_introduction(introduction)
    declaration = declare(policy.module, part=rank, parts=ranks)
    sender = PartSender(
        config=parts.weights_sync, address=address, declaration=declaration, incarnation=incarnation,
        connect=parts.broker, device=policy.device,
    )  # fmt: skip
    stack.callback(sender.close)
    return sender


def _conductor(stack: ExitStack, parts: RootParts, policy: Policy, frontier: Frontier, *, ranks: int) -> Conductor:
    """Opens the run and everything that only rank 0 has; ``stack`` closes it, in reverse order."""
    config, prompts = parts.config, parts.prompts()
    metrics, evals = (stack.enter_context(closing(JsonlSink(parts.run_dir / "logs" / name))) for name in _LOGS)
    for sink in (metrics, evals):
        sink.truncate_after(policy.version or -1)  # at version 0 the run begins anew: nothing in them is of it
    lineage = take_up(parts.run_dir, config.checkpoint.resume)
    feed = parts.open_feed(
        connect=parts.broker,
        prompts=prompts.from_frontier,
        rules=_rules(parts.rollout, parts.broker_config, lineage.run),
        version=policy.version,
        frontier=frontier,
        total_steps=config.total_steps,
        watchdog_s=parts.watchdog_s,
        after=lineage.incarnation,
    )
    stack.callback(feed.close)
    keep(parts.run_dir, replace(lineage, incarnation=feed.incarnation))
    publisher = parts.open_publisher(
        config=parts.weights_sync,
        connect=parts.broker,
        declaration=declare(policy.module, parts=ranks),
        incarnation=feed.incarnation,
        device=policy.device,
    )
    stack.callback(publisher.close)

    def flush() -> None:
        publisher.flush(parts.weights_sync.sync_timeout_s)

    evaluation = Evaluation(
        connect=parts.broker, prompts=prompts.eval_prompts, flush=flush, sink=evals, config=config.eval
    )
    stack.callback(evaluation.close)
    return Conductor(
        feed=feed, publisher=publisher, evaluation=evaluation, sink=metrics, rollout=parts.rollout,
        algorithm=parts.algorithm, config=config, flush=flush, show=parts.show, seed=parts.seed,
        packed=packs(policy.module),
    )  # fmt: skip


_LOGS = ("metrics.jsonl", "eval.jsonl")


def _rules(rollout: RolloutConfig, broker: BrokerConfig, run: str) -> Rules:
    return Rules(
        max_staleness=rollout.max_staleness,
        on_stale=rollout.on_stale,
        groups_per_step=rollout.groups_per_step,
        max_attempts=broker.max_attempts,
        lease_timeout_s=broker.lease_timeout_s,
        member_timeout_s=broker.member_timeout_s,
        max_buffer_bytes=broker.max_buffer_bytes,
        run=run,
    )


def _introduce(
    start: Path | None, version: int, frontier: Frontier, *, rollout: RolloutConfig, config: LearnerConfig
) -> None:
    """Says where the run starts from and what follows from the settings (C104, C110)."""
    lr = learning_rate(config.optim, version=version, total_steps=config.total_steps)
    log.info("%s", f"going on from {start}" if start else "starting from the initial weights")
    log.info(
        "policy version %d of %d, data position %d (+%d beyond it), learning rate %g",
        version, config.total_steps, frontier.base, len(frontier.beyond), lr,
    )  # fmt: skip
    log.info(
        "a step: %d prompts x %d completions = %d samples, about %d a rank; window of %d prompts; staleness at most %d",
        rollout.groups_per_step, rollout.completions_per_group, rollout.samples_per_step,
        -(-rollout.samples_per_step // config.ranks), rollout.window, rollout.max_staleness,
    )  # fmt: skip
