"""An engine slowed down on purpose: every completion takes an artificial time of its own, spread over its tokens.

    generate(n completions, L tokens) ─► n × L requests of one token each, with a pause after each of them

A long tail of answers is what makes tokens stale, and a small model has none. Between two of its tokens a completion
meets whatever version is in use, as a long one does. For measuring; it costs a request a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from broker.messages import Prompt, Publication, Split
from generators.engine import Engine, Sample
from generators.seeds import sampling_seed


class DelayedEngine:
    """generators.engine.Engine around another one.

    Args:
        median_s: of a completion's artificial time, which is log-normal and drawn from the prompt's seed.
        sigma: standard deviation of its logarithm.
    """

    def __init__(self, engine: Engine, *, median_s: float, sigma: float) -> None:
        self._engine, self._median_s, self._sigma = engine, median_s, sigma
        self._aborted: dict[str, asyncio.Event] = {}  # of what runs

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._engine.policy_version

    @property
    def swap_stall_s(self) -> float:
        """See Engine."""
        return self._engine.swap_stall_s

    async def start(self) -> None:
        """See Engine."""
        await self._engine.start()

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """See Engine. Evaluation is not slowed down: its answers are to have one version."""
        if prompt.split is Split.EVAL:
            return await self._engine.generate(prompt, request_id=request_id, attempt=attempt)
        self._aborted[request_id] = asyncio.Event()
        tasks = [asyncio.create_task(self._completion(prompt, request_id, attempt, index)) for index in range(prompt.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._aborted[request_id]

    async def _completion(self, prompt: Prompt, request_id: str, attempt: int, index: int) -> Sample:
        base = sampling_seed(prompt.seed, attempt) ^ index
        pause_s = self._median_s * math.exp(random.Random(base).gauss(0.0, self._sigma)) / prompt.max_tokens
        parts: list[Sample] = []
        aborted = self._aborted[request_id]
        while not parts or (parts[-1].finish_reason == "length" and len(parts) < prompt.max_tokens):
            if aborted.is_set():
                return _joined(parts, "abort")
            one = replace(
                prompt,
                token_ids=np.concatenate([prompt.token_ids, *(part.token_ids for part in parts)]).astype(np.int32),
                n=1,
                max_tokens=1,
                seed=sampling_seed(base, len(parts)),
            )
            name = f"{request_id}.{index}.{len(parts)}"
            (part,) = await self._engine.generate(one, request_id=name, attempt=attempt)
            parts.append(part)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), pause_s)
        return _joined(parts, parts[-1].finish_reason)

    async def abort(self, request_id: str) -> None:
        """See Engine."""
        if request_id in self._aborted:
            self._aborted[request_id].set()
        else:
            await self._engine.abort(request_id)

    async def stage(self, publication: Publication, *, member_id: str) -> None:
        """See Engine."""
        await self._engine.stage(publication, member_id=member_id)

    async def swap(self, publication: Publication) -> None:
        """See Engine."""
        await self._engine.swap(publication)

    async def close(self) -> None:
        """See Engine."""
        await self._engine.close()


def _joined(parts: Sequence[Sample], reason: str) -> Sample:
    """One completion of its tokens."""
    runs: list[list[int]] = []
    for version, count in (run for part in parts for run in part.version_runs.tolist()):
        if runs and runs[-1][0] == version:
            runs[-1][1] += count
        else:
            runs.append([version, count])
    return Sample(
        token_ids=np.concatenate([np.zeros(0, np.int32), *(part.token_ids for part in parts)]),
        behavior_logprobs=np.concatenate([np.zeros(0, np.float32), *(part.behavior_logprobs for part in parts)]),
        version_runs=np.asarray(runs, np.int32).reshape(-1, 2),
        finish_reason=reason,
    )
