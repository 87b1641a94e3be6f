"""``slipstream learner`` as a process."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # torch is imported once a rank

COMMAND = [sys.executable, "-P", "-m", "launch.cli", "learner"]


def test_the_error_of_a_rank_is_the_learners(tmp_path: Path) -> None:
    overrides = [f"output_dir={tmp_path}", "model.path=/nowhere", "learner.ranks=2", "broker.url=tcp://127.0.0.1:9"]
    done = subprocess.run([*COMMAND, *overrides], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "model.path" in done.stderr
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_that_find_no_broker_name_the_setting(tmp_path: Path) -> None:
    overrides = [f"output_dir={tmp_path}", "learner.ranks=2", "broker.url=tcp://127.0.0.1:9"]
    overrides += ["broker.reconnect_timeout_s=1.0"]
    done = subprocess.run([*COMMAND, *overrides], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "broker.reconnect_timeout_s" in done.stderr
