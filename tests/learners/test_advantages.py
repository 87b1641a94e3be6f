"""Advantages against the formulas, and where the formulas would divide by nothing."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from learners.advantages import (
    ADVANTAGES,
    best_worst,
    dr_grpo,
    grpo,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    zero_variance,
)
from learners.recipes import ADVANTAGE_NAMES

GROUPS = [[1.0, 0.0, 0.0, 3.0], [0.5, 0.5, 0.5], [-2.0, 4.0]]
EPS = 1e-6


def arrays(groups: list[list[float]]) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [np.array(one, np.float64) for one in groups]


def flat(values: list[np.ndarray]) -> list[float]:  # type: ignore[type-arg]
    return [float(value) for one in values for value in one]


def test_every_name_that_a_setting_may_have_is_a_function() -> None:
    assert set(ADVANTAGES) == set(ADVANTAGE_NAMES)


def test_grpo_divides_by_the_sample_deviation_of_the_group() -> None:
    expected = []
    for group in GROUPS:
        mean, deviation = sum(group) / len(group), statistics.stdev(group)
        expected += [(r - mean) / (deviation + EPS) for r in group]
    assert flat(grpo(arrays(GROUPS))) == pytest.approx(expected, rel=1e-12)


def test_dr_grpo_only_centres() -> None:
    assert flat(dr_grpo(arrays(GROUPS))) == [0.0, -1.0, -1.0, 2.0, 0.0, 0.0, 0.0, -3.0, 3.0]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = [r - (sum(group) - r) / (len(group) - 1) for group in GROUPS for r in group]
    assert flat(rloo(arrays(GROUPS))) == pytest.approx(expected, rel=1e-12)


def test_reinforce_pp_normalises_over_the_whole_step() -> None:
    rewards = [r for group in GROUPS for r in group]
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (deviation + EPS) for r in rewards]
    got = reinforce_pp(arrays(GROUPS))
    assert [len(one) for one in got] == [4, 3, 2]
    assert flat(got) == pytest.approx(expected, rel=1e-12)


def test_reinforce_pp_baseline_takes_the_groups_mean_off_first() -> None:
    centred = [r - sum(group) / len(group) for group in GROUPS for r in group]
    expected = [r / (statistics.stdev(centred) + EPS) for r in centred]
    assert flat(reinforce_pp_baseline(arrays(GROUPS))) == pytest.approx(expected, rel=1e-12)


def test_best_worst_marks_the_first_of_equals_and_nothing_where_all_are_equal() -> None:
    got = best_worst(arrays([[1.0, 3.0, 0.0, 3.0, 0.0], [0.5, 0.5]]))
    assert [one.tolist() for one in got] == [[0.0, 1.0, -1.0, 0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
@pytest.mark.parametrize("rewards", [[0.4] * 8, [0.1] * 8, [0.1] * 7, [1 / 3] * 3, [5.0]])
def test_c91_equal_rewards_give_exactly_zero(name: str, rewards: list[float]) -> None:
    assert zero_variance(rewards)
    (values,) = ADVANTAGES[name](arrays([rewards]))
    assert len(values) == len(rewards) and not values.any()


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_the_order_of_completions_and_groups_changes_nothing(name: str) -> None:
    groups = arrays([[1.0, 0.0, 0.25, 3.0], [0.5, 0.75, 0.0], [-2.0, 4.0]])
    values = ADVANTAGES[name](groups)
    turned = ADVANTAGES[name]([groups[2][::-1], groups[0], groups[1][::-1]])
    assert turned[0][::-1] == pytest.approx(values[2], rel=1e-12)
    assert turned[1] == pytest.approx(values[0], rel=1e-12)
    assert turned[2][::-1] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_a_step_without_groups_has_no_advantages(name: str) -> None:
    assert ADVANTAGES[name]([]) == []


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_c91_rewards_that_differ_in_the_last_bit_do_not_explode(name: str) -> None:
    rewards = [0.1, float(np.nextafter(0.1, 1.0))]
    assert not zero_variance(rewards)
    limit = 1.0 if name == "best_worst" else 1e-9  # which of two is better has no size
    assert np.abs(ADVANTAGES[name](arrays([rewards]))[0]).max() <= limit


def test_the_overlong_penalty_is_dapos() -> None:
    # Of 20 tokens the last 5 are the buffer: (15 - length) / 5 within it.
    lengths = np.array([0, 14, 15, 16, 18, 20])
    got = overlong_penalty(lengths, max_length=20, share=0.25, penalty=1.0)
    assert got == pytest.approx([0, 0, 0, 0.2, 0.6, 1.0])
    assert overlong_penalty(lengths, max_length=20, share=0.25, penalty=0.5) == pytest.approx(got / 2)
    assert not overlong_penalty(lengths, max_length=20, share=0.0, penalty=1.0).any()
