"""The whole run in one process, one thread of control and one seed: ``launch.mode: serial``.

    learner waits for a batch ─► the generator answers every prompt it may lease ─► the batch is there
    learner offers a version  ─► the engine holds it at once

The same ledger, admission, rollout, bound, policy and checkpoints as in separate processes; what is left out is
waiting. Two runs with one seed give the same losses, which makes this the first thing to debug with. With η > 0 the
window is filled before each step, so that what is trained is as stale as the bound allows.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import HashStore

from broker.contract import Broker
from broker.errors import SlipstreamError
from broker.local import LocalBroker
from broker.messages import Batch, Frontier, Group, Member, MemberState, Prompt, Rules, RunState
from configs.run import RunConfig
from generators.engine import Sample
from generators.groups import GroupFailed, decoder
from generators.hf_engine import HfEngine
from generators.rollout import Rollout
from generators.scoring import Scorer
from launch.generator_role import model_directory
from launch.run_folder import LAUNCHER, LEARNER, claim, draw, keep_config
from launch.step_lines import StepLines
from learners.feed import EndOfData
from learners.run import run_rank
from tasks.model import load_tokenizer
from tasks.prompts import PromptFeed
from weights_sync.stats import PublishStats

GENERATOR = "serial"


class WorkingBroker(LocalBroker):
    """A client of the run's ledger that works where another would wait."""

    work: Callable[[], None]

    @classmethod
    def over(cls, ledger: LocalBroker, work: Callable[[], None]) -> WorkingBroker:
        """A client of the same ledger as ``ledger``."""
        broker = cls(clock=_no_time, shared=(ledger.ledger, ledger._changed))
        broker.work = work
        return broker

    def take_batch(self, *, version: int, wait_s: float) -> Batch | None:
        """See broker.contract.Broker."""
        self.work()
        return super().take_batch(version=version, wait_s=0.0)

    def eval_results(self, *, version: int, count: int, wait_s: float) -> tuple[Group, ...]:
        """See broker.contract.Broker."""
        self.work()
        return super().eval_results(version=version, count=count, wait_s=0.0)


class SerialGenerator:
    """Stands where the publisher stands on the learner's side, and answers prompts when asked to."""

    def __init__(self, *, engine: HfEngine, rollout: Rollout, broker: Broker, runner: asyncio.Runner) -> None:
        self._engine, self._rollout, self._broker, self._runner = engine, rollout, broker, runner
        self._incarnation = 0
        self.stats, self.address = PublishStats(), ""

    def reserve(self) -> int:
        """There is only one place for weights."""
        return 0

    def check(self) -> None:
        """Nothing: errors are raised where they happen."""

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]], slot: int) -> None:
        """Holds ``version`` from now on."""
        self._engine.load_weights(version, tensors)
        self.stats = PublishStats(version=version)
        self._incarnation = self._broker.state().incarnation
        self._broker.report(
            Member(
                member_id=GENERATOR,
                role="generator",
                state=MemberState.SERVING,
                policy_version=version,
                incarnation=self._incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )

    def flush(self, timeout_s: float) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to stop."""

    def work(self) -> None:
        """Answers prompts until the broker leases no more; waits for nothing."""
        while leases := self._broker.lease(
            member_id=GENERATOR,
            policy_version=self._engine.policy_version,
            incarnation=self._incarnation,
            max_prompts=1,
            wait_s=0.0,
        ):
            for lease in leases:
                try:
                    self._broker.push(self._runner.run(self._rollout.answer(lease)))
                except GroupFailed as error:
                    self._broker.release(lease_id=lease.lease_id, error=str(error))


class SerialFeed:
    """learners.feed.BatchFeed without its thread: the batch of a version is put together when it is asked for."""

    def __init__(
        self,
        *,
        connect: Callable[[], Broker],
        prompts: Callable[[Frontier], Iterator[Prompt]],
        rules: Rules,
        version: int,
        frontier: Frontier,
        total_steps: int,
        watchdog_s: float,
        after: int,
    ) -> None:
        self._broker, self._source, self._rules = connect(), prompts(frontier), rules
        self.frontier = frontier
        self.incarnation = self._broker.open_run(rules=rules, version=version, frontier=frontier, after=after)
        self._hand: Batch | None = None

    def take(self, version: int, wait_s: float) -> Batch | None:
        """The batch to train at ``version``, the same one until ``trained``. Raises EndOfData."""
        if self._hand is None:
            counts = self._broker.state().counts
            room = self._rules.window - counts.queued
            self._broker.feed([prompt for _, prompt in zip(range(room), self._source, strict=False)])
            self._hand = self._broker.take_batch(version=version, wait_s=0.0)
            if self._hand is None:
                raise EndOfData("the prompts have ended; what is left does not fill a batch")
        return self._hand

    def trained(self, version: int) -> None:
        """The batch in hand has become part of ``version``."""
        batch = self._hand
        assert batch is not None
        self._broker.trained(batch_id=batch.batch_id, version=version)
        ended = [group.prompt.position for group in batch.groups] + [one.position for one in batch.ended]
        self.frontier, self._hand = self.frontier.with_ended(ended), None

    def durable(self, version: int, frontier: Frontier) -> None:
        """A checkpoint of ``version`` is complete."""
        self._broker.durable(version=version)

    def look(self) -> RunState:
        """The ledger's state."""
        return self._broker.state()

    def finish(self, reason: str) -> None:
        """Ends the run."""
        self._broker.finish(reason)

    def close(self) -> None:
        """Nothing to stop."""


def run_serial(config: RunConfig) -> LocalBroker:
    """Trains to the end in this process; returns the broker, whose ledger holds the run's books.

    Raises SlipstreamError for a configuration that needs more than one process, ConfigError for a folder in use.
    """
    if config.learner.ranks != 1 or config.generator.engine != "transformers":
        raise SlipstreamError(
            "launch.mode=serial is one process: set learner.ranks=1 and generator.engine=transformers"
            f" (they are {config.learner.ranks} and {config.generator.engine})"
        )
    for role in (LAUNCHER, LEARNER):
        claim(Path(config.run_dir), role)
    keep_config(config)
    model = model_directory(config)
    ledger, tokenizer = LocalBroker(clock=_no_time), load_tokenizer(model)
    prompts = PromptFeed(
        task=config.task,
        rollout=config.rollout,
        tokenizer=tokenizer,
        seed=config.seed,
        max_eval_prompts=config.learner.eval.max_prompts,
    )
    with asyncio.Runner() as runner:
        generator = _generator(config, model, tokenizer, ledger.client(), runner)
        run_rank(
            model_dir=model,
            run_dir=Path(config.run_dir),
            rollout=config.rollout,
            algorithm=config.algorithm,
            config=config.learner,
            weights_sync=config.weights_sync,
            broker_config=config.broker,
            broker=lambda: WorkingBroker.over(ledger, generator.work),
            prompts=lambda: prompts,
            rank=0,
            world=1,
            store=HashStore(),
            seed=config.seed,
            watchdog_s=config.launch.watchdog_s,
            attention=config.model.attention,
            open_feed=SerialFeed,
            open_publisher=lambda **_: generator,
            show=StepLines(config, tell=print),
        )
    draw(config)
    return ledger


def _generator(
    config: RunConfig, model: Path, tokenizer: Any, broker: Broker, runner: asyncio.Runner
) -> SerialGenerator:
    engine = HfEngine(
        model_path=str(model),
        rollout=config.rollout,
        config=config.generator,
        sync=config.weights_sync,
        dtype=config.model.dtype,
        seed=config.seed,
    )
    engine.load_model()
    rollout = Rollout(
        engine=_Now(engine),
        scorer=Scorer(config.task, timeout_s=config.generator.reward_timeout_s),
        decode=decoder(tokenizer),
        timeout_s=config.rollout.group_timeout_s,
        generator=GENERATOR,
    )
    return SerialGenerator(engine=engine, rollout=rollout, broker=broker, runner=runner)


class _Now:
    """The engine as a rollout sees it: an answer is there when it has been asked for."""

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """Samples in the caller's thread. Raises NonFiniteLogits."""
        return self._engine.generate_now(prompt, attempt)

    async def abort(self, request_id: str) -> None:
        """Nothing is ever under way."""


def _no_time() -> float:
    """The ledger's clock: nothing expires, so that a slow machine gives the same run."""
    return 0.0
