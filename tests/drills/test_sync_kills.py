"""A short kill drill of weight sync."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.drills.setting import ROOT

LIMIT_S = 280.0  # a drill takes some 90 s, most of it in waits for deadlines; each of its waits ends by itself


@pytest.mark.slow
def test_every_generator_comes_to_hold_the_learners_weights_whoever_is_killed() -> None:
    drill = [sys.executable, "-m", "tests.drills.sync_kills", "--kills", "4", "--seed", "7"]
    done = subprocess.run(drill, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "exact: true"
