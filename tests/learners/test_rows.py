"""Which completions become rows, with which advantage and weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.config import RolloutConfig
from broker.messages import Batch
from learners.advantages import ADVANTAGES
from learners.batching import TrainSequence
from learners.conductor import prepare
from learners.config import AlgorithmConfig
from learners.exchange import Plan, Rows
from learners.loss_means import LOSS_MEANS
from learners.recipes import LOSS_MEAN_NAMES, RECIPES
from learners.rows import WrongLength, advantages, trained_rows

Make = dict[str, Callable[..., Any]]
ROLLOUT = RolloutConfig(max_response_length=8, max_staleness=3)


def rows_of(batch: Batch, version: int = 1, **algorithm: Any) -> list[TrainSequence]:
    parts = trained_rows(batch, version=version, algorithm=AlgorithmConfig(**algorithm), rollout=ROLLOUT)
    return [row for rows in parts for row in rows]


def minis(batch: Batch, **algorithm: Any) -> list[list[TrainSequence]]:
    return trained_rows(batch, version=1, algorithm=AlgorithmConfig(**algorithm), rollout=ROLLOUT)


@pytest.fixture
def uneven(make: Make) -> Batch:
    """Two groups of rewards 0 and 1, of two and of three completions of different lengths."""
    groups = [
        make["group"]([make["completion"]([1] * 2, reward=1.0), make["completion"]([1] * 6)], position=0),
        make["group"](
            [make["completion"]([1] * 3, reward=1.0), make["completion"]([1] * 4), make["completion"]([1])], position=1
        ),
    ]
    batch: Batch = make["batch"](groups, version=1)
    return batch


def test_a_completion_without_loss_is_left_out_but_counts_in_the_baseline(make: Make) -> None:
    stale = make["completion"]([1, 1], reward=1.0, mask=[0, 0])
    group = make["group"]([stale, make["completion"]([1], reward=0.0), make["completion"]([1], reward=0.0)])
    rows = rows_of(make["batch"]([group], version=1), advantage="dr_grpo")
    assert [one.advantage for one in rows] == pytest.approx([-1 / 3, -1 / 3])


def test_the_staleness_of_each_token_is_known(make: Make) -> None:
    group = make["group"]([make["completion"]([2, 2, 4], reward=1.0), make["completion"]([5])])
    assert [row.staleness.tolist() for row in rows_of(make["batch"]([group], version=5), version=5)] == [[3, 3, 1], [0]]


def test_every_name_of_a_mean_is_a_function() -> None:
    assert set(LOSS_MEANS) == set(LOSS_MEAN_NAMES)


@pytest.mark.parametrize(
    ("loss_mean", "weights"),
    [
        ("token", [1 / 16] * 5),
        ("sequence", [1 / (5 * tokens) for tokens in (2, 6, 3, 4, 1)]),
        ("constant", [1 / (5 * 8)] * 5),
    ],
)
def test_c95_a_mean_is_over_the_rows_of_the_step(uneven: Batch, loss_mean: str, weights: list[float]) -> None:
    assert [row.weight for row in rows_of(uneven, loss_mean=loss_mean)] == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_a_mean_of_equal_losses_is_that_loss(uneven: Batch, loss_mean: str) -> None:
    rows = rows_of(uneven, loss_mean=loss_mean)
    assert sum(row.weight * row.loss_tokens for row in rows) == pytest.approx(1.0, rel=1e-12)


def test_c95_c100_cutting_the_step_into_ranks_and_micro_batches_keeps_every_weight(uneven: Batch) -> None:
    def plan_of(ranks: int, budget: int) -> list[TrainSequence]:
        settings = AlgorithmConfig(recipe="dapo")
        prepared = prepare(
            uneven, version=1, rollout=ROLLOUT, algorithm=settings, ranks=ranks, token_budget=budget
        )  # fmt: skip
        return [row for mine in prepared.plan.mini_batches[0].micro_batches for part in mine for row in part]

    def key(row: TrainSequence) -> tuple[float, int, float]:
        return row.weight, len(row), row.advantage

    whole = sorted(map(key, plan_of(1, 10_000)))
    assert len(whole) == 5
    for ranks, budget in ((1, 8), (2, 10_000), (2, 8)):
        assert sorted(map(key, plan_of(ranks, budget))) == whole


def test_c91_a_group_of_equal_rewards_is_left_out_on_request_and_of_the_mean_too(make: Make, uneven: Batch) -> None:
    same = make["group"]([make["completion"]([1] * 5, reward=0.4) for _ in range(3)], position=2)
    batch = make["batch"]([*uneven.groups, same], version=1)
    kept, skipped = rows_of(batch), rows_of(batch, zero_variance_groups="skip")
    assert (len(kept), len(skipped)) == (8, 5)
    assert {row.weight for row in kept} == {1 / 31}
    assert {row.weight for row in skipped} == {1 / 16}


def test_c97_a_batch_of_which_nothing_is_left_has_no_rows(make: Make) -> None:
    same = make["group"]([make["completion"]([1], reward=0.4) for _ in range(3)])
    batch = make["batch"]([same], version=1)
    for recipe in ("dapo", "dpo"):
        assert rows_of(batch, recipe=recipe) == []
        settings = AlgorithmConfig(recipe=recipe)  # type: ignore[arg-type]
        planned = prepare(batch, version=1, rollout=ROLLOUT, algorithm=settings, ranks=2, token_budget=99).plan
        assert (planned.loss_tokens, planned.order) == (0, [0])
        assert [one.micro_batches for one in planned.mini_batches] == [[[[]], [[]]]]


def test_an_overlong_answer_is_worth_less_than_a_short_one(make: Make) -> None:
    group = make["group"]([make["completion"]([1] * 8, reward=1.0), make["completion"]([1] * 4, reward=1.0)])
    batch = make["batch"]([group], version=1)
    assert [row.advantage for row in rows_of(batch, advantage="dr_grpo")] == [0.0, 0.0]
    shaped = rows_of(batch, advantage="dr_grpo", overlong_share=0.25, overlong_penalty=0.5)
    assert [row.advantage for row in shaped] == [-0.25, 0.25]


def test_dpo_trains_the_best_of_each_group_before_its_worst(make: Make) -> None:
    one = make["group"]([make["completion"]([1] * size, reward=size / 4) for size in (2, 1, 4, 3)], position=0)
    same = make["group"]([make["completion"]([1], reward=1.0)] * 2, position=1)
    stale = make["group"]([make["completion"]([1], reward=1.0, mask=[0]), make["completion"]([1])], position=2)
    rows = rows_of(make["batch"]([one, same, stale], version=1), recipe="dpo")
    assert [(len(row.completion_ids), row.advantage) for row in rows] == [(4, 1.0), (1, -1.0)]
    assert [row.weight for row in rows] == pytest.approx([1 / 8, 1 / 2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_gives_rows_with_finite_numbers(uneven: Batch, recipe: str) -> None:
    rows = rows_of(uneven, recipe=recipe)
    assert rows and np.isfinite([[row.advantage, row.weight] for row in rows]).all()
    if recipe == "ppo":  # what its critic is given
        assert sorted(row.advantage for row in rows) == [0.0, 0.0, 0.0, 1.0, 1.0]
    else:
        assert any(row.advantage > 0 for row in rows) and any(row.advantage < 0 for row in rows)


def test_mini_batches_are_whole_groups_drawn_anew_each_version_and_alike_for_a_seed(make: Make) -> None:
    groups = [
        make["group"]([make["completion"]([1] * (i + 1), reward=k) for k in (0, 1)], position=i) for i in range(7)
    ]
    batch = make["batch"](groups, version=1)
    settings = AlgorithmConfig(mini_batches=3, epochs=2)

    def drawn(seed: int, version: int, ranks: int = 1) -> Plan[Sequence[Rows]]:
        return prepare(
            batch, version=version, rollout=ROLLOUT, algorithm=settings, ranks=ranks, token_budget=30, seed=seed
        ).plan

    def places(one: Plan[Sequence[Rows]]) -> list[set[int]]:
        return [
            {row.index for mine in part.micro_batches for rows in mine for row in rows} for part in one.mini_batches
        ]

    first = drawn(0, 1)
    assert [len(part) for part in places(first)] == [6, 4, 4]
    assert set().union(*places(first)) == set(range(14)) and first.completions == 14
    assert all(index ^ 1 in part for part in places(first) for index in part)
    assert [sorted(first.order[:3]), sorted(first.order[3:])] == [[0, 1, 2], [0, 1, 2]]
    assert places(drawn(0, 1, ranks=2)) == places(first) and drawn(0, 1, ranks=2).order == first.order
    assert len({str(places(drawn(*key))) for key in [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1)]}) == 5
    for part in first.mini_batches:  # a mean over the mini-batch, not over the batch
        rows = [row for mine in part.micro_batches for rows in mine for row in rows]
        assert sum(row.weight * row.loss_tokens for row in rows) == pytest.approx(1.0)
        assert sum(row.loss_tokens for row in rows) == part.denominator


def test_no_mini_batch_is_empty_while_there_are_groups_to_train(make: Make, uneven: Batch) -> None:
    assert [len(rows) for rows in minis(uneven, mini_batches=9)] in ([2, 3], [3, 2])
    same = make["batch"]([make["group"]([make["completion"]([1], reward=1.0)] * 2)], version=1)
    assert minis(same, mini_batches=4, zero_variance_groups="skip") == [[]]


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp"])
def test_kl_is_taken_off_the_rewards_of_the_whole_batch_before_the_advantages(uneven: Batch, advantage: str) -> None:
    kl = np.array([0.5, 0.25, -0.125, 1.0, 2.0])
    rewards = [np.array([1.0, 0.0]), np.array([1.0, 0.0, 0.0])]
    shaped = [mine - 0.3 * part for mine, part in zip(rewards, np.split(kl, [2]), strict=True)]
    algorithm = AlgorithmConfig(advantage=advantage, kl_coef=0.3, kl_in="reward")
    got = advantages(uneven, algorithm=algorithm, rollout=ROLLOUT, kl_N=kl)
    np.testing.assert_allclose(got, np.concatenate(ADVANTAGES[advantage](shaped)), rtol=1e-12)


OWN = """
import numpy as np

def advantage(groups):
    return [rewards - np.median(rewards) for rewards in groups]

def mean(tokens, max_response_length):
    return np.full(len(tokens), 0.5)

def short(groups):
    return [rewards[1:] for rewards in groups]

def infinite(groups):
    return [rewards + np.inf for rewards in groups]
"""


def test_advantages_and_means_come_from_the_users_file(uneven: Batch, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    rows = rows_of(uneven, advantage=f"{file}:advantage", loss_mean=f"{file}:mean")
    assert [row.advantage for row in rows] == [0.5, -0.5, 1.0, 0.0, 0.0]
    assert {row.weight for row in rows} == {0.5}


@pytest.mark.parametrize(
    ("name", "told"), [("short", r"gave \[1, 2\] numbers for \[2, 3\]"), ("infinite", "not finite")]
)
def test_an_advantage_that_gives_something_else_is_named(uneven: Batch, tmp_path: Path, name: str, told: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    with pytest.raises(WrongLength, match=rf"algorithm\.advantage=.*mine\.py:{name}: .*{told}"):
        rows_of(uneven, advantage=f"{file}:{name}")
