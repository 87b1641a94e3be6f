"""What the benchmark of staleness makes of a run's lines, and that its settings are settings."""

from __future__ import annotations

import pytest

from benchmarks.staleness import MEASURES, outcome
from configs.load import load
from configs.presets import DEFAULT, PRESETS


def _line(step: int, reward: float) -> dict[str, object]:
    return {
        "step": step, "time": 100.0 + 2.0 * step, "reward_mean": reward, "trained_tokens": 5, "staleness_mean": 1.5,
        "masked_share": 0.25, "stale_groups": 1, "groups": 3, "step_s": 2.0,
    }  # fmt: skip


def test_time_steps_and_tokens_are_to_the_first_ten_steps_with_the_reward() -> None:
    """Ten steps of nothing, then of 1: the last ten have a mean of 0.8 at step 18."""
    one = outcome([_line(step, float(step > 10)) for step in range(1, 31)])
    assert (one.steps, one.seconds, one.tokens) == (18, 34.0, 90)
    assert (one.final_reward, one.staleness, one.masked, one.thrown_away, one.step_s) == (1.0, 1.5, 0.25, 0.25, 2.0)


def test_a_run_that_never_learns_says_so() -> None:
    """No made-up number stands for it."""
    one = outcome([_line(step, 0.5) for step in range(1, 31)])
    assert (one.steps, one.seconds, one.tokens, one.final_reward) == (None, None, None, 0.5)


@pytest.mark.parametrize("settings", [one for runs in MEASURES.values() for one in runs.values()])
def test_the_settings_of_each_run_are_valid(settings: tuple[str, ...]) -> None:
    """A renamed setting shows here, not after minutes."""
    load(PRESETS / f"{DEFAULT}.yaml", list(settings))
