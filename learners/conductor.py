"""What rank 0 does around the steps: batches in, plans out; versions, books and metrics out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from broker.config import RolloutConfig
from broker.errors import RunFinished
from broker.messages import Batch, Frontier, RunState
from learners.config import AlgorithmConfig, LearnerConfig
from learners.evaluation import Evaluation
from learners.exchange import MiniBatch, Plan, Produce, Rows, encode
from learners.feed import EndOfData
from learners.losses import PAIRED
from learners.planning import padding_share, plan, plan_pairs
from learners.report import StaleGroups, Stopwatch, fill, metrics, synced
from learners.rows import advantages, trained_rows
from learners.saving import Saved
from learners.staleness import Staleness, apply_bound
from learners.stats import StepStats
from telemetry.sink import JsonlSink
from weights_sync.errors import SyncFailed
from weights_sync.stats import PublishStats

log = logging.getLogger(__name__)

END = b""
_MUCH_REJECTED = 0.1  # of the loss tokens: by then the correction decides more than the rewards do (C26)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch made ready for training at one version."""

    batch: Batch
    staleness: Staleness
    plan: Plan[Sequence[Rows]]
    padding_share: float


def prepare(
    batch: Batch,
    *,
    version: int,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    ranks: int,
    token_budget: int,
    seed: int = 0,
    packed: bool = False,
) -> Prepared:
    """Bound, advantages, micro-batches: everything between the broker's batch and the ranks' forward passes."""
    bounded, staleness = apply_bound(
        batch, version=version, max_staleness=rollout.max_staleness, on_stale=rollout.on_stale
    )
    parts = trained_rows(bounded, version=version, algorithm=algorithm, rollout=rollout, seed=seed)
    make = partial(plan_pairs if algorithm.loss in PAIRED else plan, ranks=ranks, token_budget=token_budget)
    planned = [make([len(row) for row in rows], packed=packed) for rows in parts]
    mini_batches = [
        MiniBatch(
            denominator=sum(row.loss_tokens for row in rows),
            micro_batches=[[[rows[i] for i in part] for part in mine] for mine in ranked],
        )
        for rows, ranked in zip(parts, planned, strict=True)
    ]
    order = np.random.default_rng((seed, version, 1))
    return Prepared(
        batch=bounded,
        staleness=staleness,
        plan=Plan(
            mini_batches=mini_batches,
            order=[k for _ in range(algorithm.epochs) for k in order.permutation(len(parts)).tolist()],
            completions=sum(len(group.completions) for group in bounded.groups),
        ),
        padding_share=0.0 if packed else _padding(planned, parts),
    )


class Feed(Protocol):
    """What learners.feed.BatchFeed offers."""

    frontier: Frontier
    incarnation: int

    def take(self, version: int, wait_s: float) -> Batch | None:
        """The batch to train at ``version``."""

    def trained(self, version: int) -> None:
        """The batch in hand has become part of ``version``."""

    def durable(self, version: int, frontier: Frontier) -> None:
        """A checkpoint of ``version`` is complete, with the data position that it holds."""

    def look(self) -> RunState:
        """The broker's state, for what is told of a step."""

    def finish(self, reason: str) -> None:
        """Ends the run."""

    def close(self) -> None:
        """Stops it."""


class Publishing(Protocol):
    """What weights_sync.publisher.Publisher offers."""

    stats: PublishStats
    address: str

    def reserve(self) -> int:
        """The slot that every rank fills with the next version."""

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]], slot: int) -> None:
        """Takes a copy of what rank 0 has of a version, to be sent beside the next step."""

    def flush(self, timeout_s: float) -> None:
        """Waits until the newest version is in use everywhere."""

    def check(self) -> None:
        """Raises what ended it, if anything has."""

    def close(self) -> None:
        """Stops it."""


Show = Callable[[Mapping[str, object], RunState], None]


class Conductor:
    """Rank 0's part of the loop; the other ranks have none.

    ``show``: is told each step's metrics line, with the broker's state after the step. ``seed``: of the mini-batches.
    ``packed``: whether the model takes rows without padding.
    """

    def __init__(
        self,
        *,
        feed: Feed,
        publisher: Publishing,
        evaluation: Evaluation,
        sink: JsonlSink,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        flush: Callable[[], None],
        show: Show,
        seed: int = 0,
        packed: bool = False,
    ) -> None:
        self._feed, self._publisher, self._evaluation, self._sink = feed, publisher, evaluation, sink
        self._rollout, self._algorithm, self._config, self._flush = rollout, algorithm, config, flush
        self._show, self._seed, self._packed = show, seed, packed
        self._stale = StaleGroups(feed.look().counts)
        self._prepared: Prepared | None = None
        self.end = "completed"

    @property
    def frontier(self) -> Frontier:
        """The data position of what has been trained."""
        return self._feed.frontier

    def next_plan(self, version: int) -> Produce:
        """Polls for the step at ``version``: its plan, END when there is nothing more to train, None while waiting.

        Raises what ended the publisher: without generators no batch would ever come.
        """

        def poll(wait_s: float) -> bytes | None:
            try:
                batch = self._feed.take(version, wait_s)
            except (EndOfData, RunFinished) as over:
                self.end = str(over)
                return END
            if batch is None:
                self._publisher.check()
                return None
            self._prepared = prepare(
                batch,
                version=version,
                rollout=self._rollout,
                algorithm=self._algorithm,
                ranks=self._config.ranks,
                token_budget=self._config.micro_batch_tokens,
                seed=self._seed,
                packed=self._packed,
            )
            return encode(self._prepared.plan)

        return poll

    def advantages(self, kl_N: NDArray[np.float64]) -> Produce:
        """The advantages of the batch in hand once the KL of each of its completions is known."""

        def poll(wait_s: float) -> bytes:
            assert self._prepared is not None
            batch = self._prepared.batch
            return advantages(batch, algorithm=self._algorithm, rollout=self._rollout, kl_N=kl_N).tobytes()

        return poll

    def evaluate(self, version: int) -> Produce:
        """Starts a validation pass, to be polled until it is over."""
        return self._evaluation.start(version)

    def introduction(self, wait_s: float) -> bytes:
        """What the other ranks need to send their parts of the weights: see ``read_introduction``."""
        return f"{self._feed.incarnation} {self._publisher.address}".encode()

    def reserve(self, wait_s: float) -> bytes:
        """The slot of the next version, for every rank."""
        return bytes([self._publisher.reserve()])

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]], slot: int) -> None:
        """Hands rank 0's elements of a version to the publisher, which sends it beside the next step."""
        self._publisher.offer(version, tensors, slot)

    def stepped(self, stats: StepStats, watch: Stopwatch) -> None:
        """Books the step with the broker, if it had an effect, and writes its metrics line."""
        prepared = self._prepared
        assert prepared is not None
        if stats.applied:
            self._feed.trained(stats.version)
        if stats.rejected_share > _MUCH_REJECTED:
            log.warning(
                "%.0f %% of the loss tokens have correction weight 0 (log-ratio of a token %.3g on average, completion "
                "ratios up to %.3g): widen algorithm.correction.floor and cap, or lower rollout.max_staleness",
                100 * stats.rejected_share, -stats.kl_behavior_k1, stats.sequence_ratio_max,
            )  # fmt: skip
        state = self._feed.look()
        step = metrics(
            batch=prepared.batch,
            staleness=prepared.staleness,
            stats=stats,
            trained_tokens=prepared.plan.loss_tokens,
            micro_batches=sum(len(mine) for one in prepared.plan.mini_batches for mine in one.micro_batches),
            padding_share=prepared.padding_share,
            stale_groups=self._stale.since(state.counts),
            times=watch.read(),
        )
        line = step | fill(state) | synced(self._publisher.stats)
        self._sink.write(line)
        self._show(line, state)

    def saved(self, saved: Saved | None) -> None:
        """Tells the broker of a checkpoint that is complete."""
        if saved is not None:
            self._feed.durable(saved.version, saved.frontier)

    def finish(self) -> None:
        """Lets the generators take the last version, then ends the run for everyone."""
        try:
            self._flush()
        except SyncFailed as error:  # the run is complete without them
            log.warning("the run ends before every generator has its last version: %s", error)
        self._feed.finish(self.end)


def read_introduction(frame: bytes) -> tuple[str, int]:
    """(address of the publisher's store, incarnation)."""
    incarnation, _, address = frame.decode().partition(" ")
    return address, int(incarnation)


def _padding(planned: Sequence[list[list[list[int]]]], parts: Rows) -> float:
    """Share of padding over all mini-batches."""
    starts = accumulate((len(rows) for rows in parts), initial=0)
    every = [
        [start + i for i in part]
        for start, ranked in zip(starts, planned, strict=False)
        for mine in ranked
        for part in mine
    ]
    return padding_share([every], [len(row) for rows in parts for row in rows])
