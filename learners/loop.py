"""The learner's loop, run by every rank.

    broker ─batch─► bound ─► advantages ─► plan ─share─► step: version + 1 ─┬─► offer to the generators
                                                                            └─► trained ─► metrics ─► checkpoint

A checkpoint is copied between two steps and written beside the next ones (learners/saving.py).
Where a KL divergence acts on the rewards, the advantages follow in a second frame: a step begins with the passes that
tell it (learners/scores.py), and rank 0 has the rewards.

Rank 0 has a conductor, which talks to the broker, the publisher and the files. The others have a sender for their part
of the weights, and wait in ``exchange.share``
for rank 0, which waits for a batch; a finished group wakes it, and ``learner.collective_timeout_s`` and
``launch.watchdog_s`` end it.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from broker.messages import Frontier
from learners.conductor import END, Conductor
from learners.config import LearnerConfig
from learners.exchange import Exchange, decode
from learners.policy import Policy
from learners.report import Stopwatch
from learners.saving import Saver
from weights_sync.part_sender import PartSender


def learn(
    *,
    policy: Policy,
    exchange: Exchange,
    conductor: Conductor | None,
    sender: PartSender | None,
    saver: Saver,
    config: LearnerConfig,
    rank: int,
) -> None:
    """Trains until ``learner.total_steps``, the end of the data, or the end of the run."""

    def revalue(kl_N: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.frombuffer(exchange.share(conductor.advantages(kl_N) if conductor else None), np.float64)

    saved = policy.version
    publish(policy, exchange, conductor, sender)
    watch = Stopwatch()
    evaluate(policy, exchange, conductor, due=config.eval.at_start and policy.version == 0)
    watch.lap("eval")
    while policy.version < config.total_steps:
        frame = exchange.share(conductor.next_plan(policy.version) if conductor else None)
        watch.lap("wait")
        if frame == END:
            break
        stats = policy.step(decode(frame, rank), revalue)
        time.sleep(config.delay_s)
        watch.lap("train")
        if stats.applied:
            publish(policy, exchange, conductor, sender)
        watch.lap("publish")
        if conductor:
            conductor.stepped(stats, watch)
            conductor.saved(saver.wait(0.0))
        if stats.applied and _due(policy.version, config.checkpoint.every_steps):
            saved = save(policy, exchange, conductor, saver, background=config.checkpoint.background)
        watch.lap("save")
        in_between = stats.applied and policy.version < config.total_steps
        evaluate(policy, exchange, conductor, due=in_between and _due(policy.version, config.eval.every_steps))
        watch.lap("eval")
    evaluate(policy, exchange, conductor, due=config.eval.at_end)
    if saved != policy.version:
        save(policy, exchange, conductor, saver, background=False)
    settle(exchange, conductor, saver)


def publish(policy: Policy, exchange: Exchange, conductor: Conductor | None, sender: PartSender | None) -> None:
    """Collective, for the number of a staging slot. Every rank copies its own elements there; they are sent beside."""
    slot = exchange.share(conductor.reserve if conductor else None)[0]
    if conductor:
        conductor.offer(policy.version, policy.parts(), slot)
    elif sender:
        sender.offer(policy.version, policy.parts(), slot)


def evaluate(policy: Policy, exchange: Exchange, conductor: Conductor | None, *, due: bool) -> None:
    """Collective. A validation pass at the present version, which stays the present one: every rank stands still."""
    if due:
        exchange.share(conductor.evaluate(policy.version) if conductor else None)


def save(policy: Policy, exchange: Exchange, conductor: Conductor | None, saver: Saver, *, background: bool) -> int:
    """Collective. Begins a checkpoint, after the one before is complete; without ``background`` this one is complete
    too when it returns. Returns its version.
    """
    settle(exchange, conductor, saver)
    frontier = conductor.frontier if conductor else Frontier()
    saver.begin(policy.version, frontier, partial(policy.capture, background=background))
    if not background:
        settle(exchange, conductor, saver)
    return policy.version


def settle(exchange: Exchange, conductor: Conductor | None, saver: Saver) -> None:
    """Collective. Waits until no checkpoint is being written; the broker is told of the last."""

    def complete(wait_s: float) -> bytes | None:
        assert conductor is not None
        conductor.saved(saver.wait(wait_s))
        return b"" if saver.idle else None

    exchange.share(complete if conductor else None)


def _due(version: int, every_steps: int) -> bool:
    return every_steps > 0 and version % every_steps == 0
