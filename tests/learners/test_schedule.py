"""The learning rate at every version."""

from __future__ import annotations

import pytest

from learners.config import OptimConfig
from learners.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828, 0.6, 0.3172]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule=schedule, min_lr_ratio=0.2)  # type: ignore[arg-type]
    rates = [learning_rate(config, version=version, total_steps=8) for version in range(8)]
    assert rates == pytest.approx(expected, abs=1e-3)


def test_the_rate_stays_at_its_floor_after_the_last_step() -> None:
    config = OptimConfig(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert learning_rate(config, version=50, total_steps=8) == pytest.approx(0.1)
