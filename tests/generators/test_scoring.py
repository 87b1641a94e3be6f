from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from broker.messages import Prompt, Split
from generators.scoring import MAX_STUCK, RewardFailed, RewardsStuck, Score, Scorer
from tasks.config import TaskConfig
from tasks.loading import TaskError

REWARDS = Path(__file__).with_name("rewards_under_test.py")


def scorer(*names: str, timeout_s: float = 5.0, **weights: float) -> Scorer:
    task = TaskConfig(rewards={name: f"{REWARDS}:{name}" for name in names}, weights=weights)
    return Scorer(task, timeout_s=timeout_s)


def prompt(text: str = "2+2=", reference: str = "four") -> Prompt:
    return Prompt(
        item="0",
        position=0,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.zeros(1, np.int32),
        text=text,
        reference=reference,
        n=1,
        temperature=1.0,
        max_tokens=1,
        seed=0,
    )


async def score_all(subject: Scorer, answers: list[str]) -> list[Score | BaseException]:
    return await asyncio.gather(*(subject.score(prompt=prompt(), answer=a) for a in answers), return_exceptions=True)


def test_the_reward_is_the_weighted_sum_of_its_named_parts() -> None:
    result = asyncio.run(scorer("one", "half", half=3.0).score(prompt=prompt(), answer=""))
    assert result == Score(reward=2.5, parts={"one": 1.0, "half": 0.5})


def test_a_reward_function_gets_prompt_text_answer_and_reference() -> None:
    assert asyncio.run(scorer("arguments").score(prompt=prompt(), answer="4")).reward == 1.0


def test_c87_a_reward_that_needs_the_main_thread_is_a_failure_and_not_a_zero() -> None:
    with pytest.raises(RewardFailed, match=r"alarm.*ValueError"):
        asyncio.run(scorer("alarm").score(prompt=prompt(), answer=""))


def test_an_exception_of_any_kind_fails_this_answer_alone() -> None:
    results = asyncio.run(score_all(scorer("fails_on_bad"), ["good", "bad", "good"]))
    assert [isinstance(result, Score) for result in results] == [True, False, True]
    assert isinstance(results[1], RewardFailed)
    assert "StopIteration: no idea" in str(results[1])


@pytest.mark.parametrize(
    "name",
    ["exits", "interrupts", "cancels", "exits_later", "interrupts_later", "cancels_later", "exits_in_disguise"],
)
def test_a_reward_that_wants_to_end_the_process_fails_at_once_and_alone(name: str) -> None:
    async def score() -> Score:
        with pytest.raises(RewardFailed, match=rf"reward '{name}': (SystemExit|KeyboardInterrupt|CancelledError)"):
            await scorer(name, timeout_s=60.0).score(prompt=prompt(), answer="")
        return await scorer("one").score(prompt=prompt(), answer="")

    began = time.monotonic()
    assert asyncio.run(score()).reward == 1.0
    assert time.monotonic() - began < 5.0


def test_scoring_that_is_called_off_is_cancelled_and_no_failure() -> None:
    async def score() -> None:
        scoring = asyncio.create_task(scorer("later", "hangs_on_bad").score(prompt=prompt(), answer="good"))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(score())


def test_c88_a_reward_that_hangs_costs_its_own_answer_and_not_the_others() -> None:
    subject = scorer("hangs_on_bad", timeout_s=0.2)
    results = asyncio.run(score_all(subject, ["good"] * 15 + ["bad"] + ["good"] * 15))
    assert [i for i, result in enumerate(results) if not isinstance(result, Score)] == [15]
    assert "generator.reward_timeout_s" in str(results[15])


def test_c88_threads_that_never_come_back_are_bounded_and_end_in_a_named_error() -> None:
    results = asyncio.run(score_all(scorer("hangs_on_bad", timeout_s=0.1), ["bad"] * MAX_STUCK))
    assert any(isinstance(result, RewardsStuck) for result in results)


@pytest.mark.parametrize("name", ["later", "coroutine_in_disguise"])
def test_c90_asynchronous_rewards_are_awaited_side_by_side(name: str) -> None:
    began = time.monotonic()
    results = asyncio.run(score_all(scorer(name), ["x"] * 16))
    assert time.monotonic() - began < 1.0
    assert [result.reward for result in results if isinstance(result, Score)] == [1.0] * 16


@pytest.mark.parametrize("name", ["infinite", "nothing"])
def test_what_is_not_a_finite_number_is_a_failure(name: str) -> None:
    with pytest.raises(RewardFailed, match=name):
        asyncio.run(scorer(name).score(prompt=prompt(), answer=""))


def test_a_reward_that_is_not_there_is_named_with_what_is_near() -> None:
    with pytest.raises(TaskError, match=r"task\.rewards\.x: .*did you mean 'half'"):
        Scorer(TaskConfig(rewards={"x": f"{REWARDS}:halv"}), timeout_s=1.0)


@pytest.mark.parametrize("name", ["divides", "divides_later"])
def test_an_exception_is_told_with_its_line_in_the_rewards_own_file(name: str) -> None:
    with pytest.raises(RewardFailed, match=r"ZeroDivisionError: division by zero \(rewards_under_test\.py:\d+\)"):
        asyncio.run(scorer(name).score(prompt=prompt(), answer=""))
