"""The engine slowed down on purpose: the same answers' shape, versions that change within a completion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from broker.messages import Prompt, Publication, Split
from generators.delayed import DelayedEngine
from generators.engine import Sample
from generators.fake_engine import FakeEngine, fake_logprob


def _prompt(split: Split = Split.TRAIN) -> Prompt:
    return Prompt(
        item="3", position=3, epoch=0, split=split, token_ids=np.array([1, 2], np.int32), text="", reference="",
        n=4, temperature=1.0, max_tokens=3, seed=7,
    )  # fmt: skip


def _publication(version: int) -> Publication:
    return Publication(attempt=version, version=version, incarnation=0, epoch=0, store="", receivers=())


async def _sampled(
    *, delay_s: float, swap_after_s: float, split: Split = Split.TRAIN, abort: bool = False
) -> tuple[Sequence[Sample], FakeEngine]:
    inner = FakeEngine(answer=lambda prompt, index: [10 * len(prompt.token_ids)])
    engine = DelayedEngine(inner, median_s=delay_s, sigma=0.0)
    await engine.start()
    await engine.swap(_publication(0))
    answer = asyncio.create_task(engine.generate(_prompt(split), request_id="r", attempt=0))
    await asyncio.sleep(swap_after_s)
    if abort:
        await engine.abort("r")
    await engine.swap(_publication(1))
    return await answer, inner


def test_completions_are_sampled_token_by_token_under_the_version_of_the_moment() -> None:
    """Each token sees those before it; its version and log-probability are those of when it was sampled."""
    samples, _ = asyncio.run(_sampled(delay_s=0.6, swap_after_s=0.1))
    assert len(samples) == 4
    for sample in samples:
        assert sample.token_ids.tolist() == [20, 30, 40]
        assert sample.version_runs.tolist() == [[0, 1], [1, 2]]
        wanted = [fake_logprob(0, 20), fake_logprob(1, 30), fake_logprob(1, 40)]
        assert sample.behavior_logprobs.tolist() == wanted
        assert sample.finish_reason == "length"


def test_an_abort_ends_each_completion_at_its_next_token() -> None:
    """What there is comes back at once, and says so."""
    samples, _ = asyncio.run(asyncio.wait_for(_sampled(delay_s=600.0, swap_after_s=0.1, abort=True), 10.0))
    assert [sample.finish_reason for sample in samples] == ["abort"] * 4
    assert [len(sample.token_ids) for sample in samples] == [1] * 4


def test_evaluation_is_one_request() -> None:
    """It is to have one version, and is not slowed down."""
    _, inner = asyncio.run(_sampled(delay_s=0.6, swap_after_s=0.0, split=Split.EVAL))
    assert inner.sampled == ["3"]
