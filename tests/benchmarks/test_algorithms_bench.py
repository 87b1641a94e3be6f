"""The benchmark of the algorithms runs to its end and tells what a run came to, in its smallest form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_run_of_two_recipes_has_a_line_each_and_misses_the_reward() -> None:
    options = ["--only", "dpo", "ppo", "--steps", "3", "--strict"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.algorithms", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[:3] for line in lines] == [["dpo", "0", "never"], ["ppo", "0", "never"]]
    for reward, evaluation, staleness in (map(float, line[3:]) for line in lines):
        assert 0.0 <= reward < 0.5 and 0.0 <= evaluation <= 1.0
        assert staleness == pytest.approx(2 / 3, abs=0.01)  # none in the first step, one in the others
