from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from broker.messages import Lease, Prompt, Publication, Split
from generators.engine import EngineDead
from generators.fake_engine import FakeEngine
from generators.groups import GroupFailed
from generators.rollout import Rollout
from generators.scoring import Scorer
from tasks.config import TaskConfig

REWARDS = Path(__file__).with_name("rewards_under_test.py")


def lease(lease_id: str = "l") -> Lease:
    prompt = Prompt(
        item="0",
        position=0,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.zeros(1, np.int32),
        text="",
        reference="",
        n=3,
        temperature=1.0,
        max_tokens=5,
        seed=0,
    )
    return Lease(lease_id=lease_id, prompt=prompt, attempt=1, incarnation=0)


async def ready(engine: FakeEngine, *, timeout_s: float = 10.0, delay_s: float = 0.0, reward: str = "one") -> Rollout:
    publication = Publication(version=0, incarnation=0, attempt=1, epoch=0, store="", receivers=())
    await engine.swap(publication)
    return Rollout(
        engine=engine,
        scorer=Scorer(TaskConfig(rewards={reward: f"{REWARDS}:{reward}"}), timeout_s=5.0),
        decode=lambda sample: "",
        timeout_s=timeout_s,
        generator="g",
        delay_s=delay_s,
    )


def test_a_cancelled_answer_aborts_its_request() -> None:
    class Watched(FakeEngine):
        aborts: tuple[str, ...] = ()

        async def abort(self, request_id: str) -> None:
            self.aborts += (request_id,)
            await super().abort(request_id)

    async def test() -> None:
        engine = Watched(hold_at=2)
        task = asyncio.create_task((await ready(engine)).answer(lease("mine")))
        async with asyncio.timeout(5.0):
            while engine.running.is_set():
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5.0)
        assert task.cancelled()
        assert engine.aborts == ("mine",)

    asyncio.run(test())


def test_an_engine_that_ignores_an_abort_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generators.rollout.ABORT_S", 0.1)

    class Deaf(FakeEngine):
        async def abort(self, request_id: str) -> None:
            """Does nothing."""

    async def test() -> None:
        rollout = await ready(Deaf(hold_at=2), timeout_s=0.1)
        with pytest.raises(EngineDead, match="did not end request"):
            await rollout.answer(lease())

    asyncio.run(test())


def test_the_artificial_delay_counts_as_generation() -> None:
    async def test() -> None:
        group = await (await ready(FakeEngine(), delay_s=0.15)).answer(lease())
        assert group.generation_s >= 0.15

    asyncio.run(test())


def test_a_reward_that_always_raises_is_one_warning_a_group_and_the_reason_of_its_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        with pytest.raises(GroupFailed, match=r"0 of 3.*'divides': ZeroDivisionError: .* \(rewards_under_test\.py:\d+"):
            await (await ready(FakeEngine(), reward="divides")).answer(lease())

    asyncio.run(test())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "3 of 3 completions have no reward" in warnings[0]
    assert "ZeroDivisionError" in warnings[0]
