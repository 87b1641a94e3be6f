"""One group: sample, decode, score, build. The generator's loop and the serial mode both call ``Rollout.answer``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from broker.messages import Group, Lease, Prompt
from generators.engine import EngineDead, Sample
from generators.groups import Decode, build_group, finished
from generators.scoring import RewardFailed, Score, Scorer

log = logging.getLogger(__name__)

ABORT_S = 10.0  # for an engine to end a request that was aborted


class Sampling(Protocol):
    """What a rollout asks of an engine; see generators.engine.Engine."""

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """Samples ``prompt.n`` completions."""

    async def abort(self, request_id: str) -> None:
        """Ends a running request early."""


class Rollout:
    """What it takes to answer a prompt.

    Args:
        timeout_s: ``rollout.group_timeout_s``; completions that are unfinished then are given up.
        delay_s: artificial time per group, for measuring overlap.
    """

    def __init__(
        self,
        *,
        engine: Sampling,
        scorer: Scorer,
        decode: Decode,
        timeout_s: float,
        generator: str,
        delay_s: float = 0.0,
    ) -> None:
        self._engine, self._scorer, self._decode = engine, scorer, decode
        self._timeout_s, self._generator, self._delay_s = timeout_s, generator, delay_s

    async def answer(self, lease: Lease, *, on_sampled: Callable[[], None] = lambda: None) -> Group:
        """The group of this lease, of the completions that succeeded. ``on_sampled``: called when the engine is done.

        Raises GroupFailed when too few did, NonFiniteLogits or EngineDead when the engine is of no more use, and
        RewardsStuck when the rewards are. Cancelling it aborts the request.
        """
        began = time.monotonic()
        samples = finished(await self._sample(lease))
        on_sampled()
        await asyncio.sleep(self._delay_s)
        texts = [self._decode(sample) for sample in samples]
        scores = await asyncio.gather(*(self._score(lease, text) for text in texts))
        failures = [score for score in scores if isinstance(score, RewardFailed)]
        if failures:  # one line a group: a reward that always raises would else fill the log
            log.warning(
                "item %s: %d of %d completions have no reward; the first: %s",
                lease.prompt.item, len(failures), len(texts), failures[0],
            )  # fmt: skip
        return build_group(
            lease=lease,
            samples=samples,
            texts=texts,
            scores=[None if isinstance(score, RewardFailed) else score for score in scores],
            why=str(failures[0]) if failures else "",
            generator=self._generator,
            generation_s=time.monotonic() - began,
        )

    async def _sample(self, lease: Lease) -> Sequence[Sample]:
        """What the engine has after at most ``timeout_s``; the unfinished ones then say ``"abort"``."""
        request = lease.lease_id
        run = asyncio.create_task(self._engine.generate(lease.prompt, request_id=request, attempt=lease.attempt))
        try:
            await asyncio.wait({run}, timeout=self._timeout_s)
            if not run.done():
                log.warning("item %s is over rollout.group_timeout_s = %g", lease.prompt.item, self._timeout_s)
                await self._engine.abort(request)
                await asyncio.wait({run}, timeout=ABORT_S)
            if not run.done():
                raise EngineDead(f"the engine did not end request {request} within {ABORT_S:g} s of its abort")
            return run.result()
        finally:
            if not run.done():
                run.cancel()
                await self._engine.abort(request)

    async def _score(self, lease: Lease, text: str) -> Score | RewardFailed:
        try:
            return await self._scorer.score(prompt=lease.prompt, answer=text)
        except RewardFailed as error:
            return error
