"""Short kill drills of both backends, with and without a memory that outlives them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.drills.setting import ROOT

LIMIT_S = 150.0  # a drill takes some 20 s; one that does not move for a minute ends by itself and says why


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["disk", "memory"])
@pytest.mark.parametrize("backend", ["zmq", pytest.param("redis", marks=pytest.mark.service)])
def test_every_item_is_trained_once_or_dead_whatever_is_killed(backend: str, durability: str) -> None:
    drill = [sys.executable, "-m", "tests.drills.broker_kills", "--kills", "20", "--prompts", "100", "--seed", "7"]
    chosen = ["--backend", backend, "--durability", durability]
    done = subprocess.run([*drill, *chosen], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "exact: true"
