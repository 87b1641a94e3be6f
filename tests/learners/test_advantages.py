"""Advantages against the formulas, and where the formulas would divide by nothing."""

from __future__ import annotations

import numpy as np
import pytest

from learners.advantages import dr_grpo, grpo, zero_variance


def test_grpo_divides_by_the_sample_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]
    deviation = (sum((r - 1.0) ** 2 for r in rewards) / 3) ** 0.5
    assert grpo(rewards) == pytest.approx([(r - 1.0) / (deviation + 1e-6) for r in rewards], rel=1e-12)


def test_dr_grpo_only_centres() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 3.0]).tolist() == [0.0, -1.0, -1.0, 2.0]


@pytest.mark.parametrize("rewards", [[0.4] * 8, [0.1] * 8, [0.1] * 7, [1 / 3] * 3, [5.0]])
def test_c91_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    assert zero_variance(rewards)
    assert not grpo(rewards).any()
    assert not dr_grpo(rewards).any()


def test_rewards_that_differ_in_the_last_bit_do_not_explode() -> None:
    rewards = [0.1, float(np.nextafter(0.1, 1.0))]
    assert not zero_variance(rewards)
    assert np.abs(grpo(rewards)).max() < 1e-9
