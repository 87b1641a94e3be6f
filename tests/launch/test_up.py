"""``slipstream up`` with the real roles: it finishes by itself, and however it is ended nobody is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from telemetry.sink import read_jsonl

pytestmark = pytest.mark.slow

START_S = 120.0  # until the first step of a run that shares its two cores with others
TINY = ["generator.count=1", "rollout.groups_per_step=4", "rollout.completions_per_group=4", "learner.total_steps=2000"]
TINY += ["learner.eval.at_start=false", "learner.eval.at_end=false", "telemetry.live=false"]


def up(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "launch.cli", "up", f"output_dir={tmp_path}", *TINY, *overrides]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def family_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> list[psutil.Process]:
    """The run's processes at the moment when ``ready`` first holds."""
    deadline = time.monotonic() + START_S
    while not ready():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
    return psutil.Process(process.pid).children(recursive=True)


def trained(tmp_path: Path, steps: int = 1) -> bool:
    return len(read_jsonl(tmp_path / "slipstream" / "quickstart" / "logs" / "metrics.jsonl")) >= steps


def saving(tmp_path: Path) -> bool:
    checkpoints = tmp_path / "slipstream" / "quickstart" / "checkpoints"
    return checkpoints.is_dir() and any(checkpoints.iterdir())


def assert_gone(family: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(family, timeout=within_s)
    assert [(each.pid, each.cmdline()) for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("signum", "code", "moment"),
    [(signal.SIGINT, 130, "start-up"), (signal.SIGTERM, 143, "mid-step"), (signal.SIGINT, 130, "mid-save")],
)
def test_c111_a_signal_takes_the_real_roles_down(
    signum: signal.Signals, code: int, moment: str, tmp_path: Path
) -> None:
    process = up(tmp_path, *(["learner.checkpoint.every_steps=1"] if moment == "mid-save" else []))
    conditions: dict[str, Callable[[], bool]] = {
        # The engine's own process is there, and not yet the model in it.
        "start-up": lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 6,
        "mid-step": lambda: trained(tmp_path, 3),
        "mid-save": lambda: saving(tmp_path),
    }
    family = family_when(process, conditions[moment])
    assert len(family) >= 5  # broker, learner, two ranks, generator, and the engine
    began = time.monotonic()
    process.send_signal(signum)
    output, _ = process.communicate(timeout=20.0)
    assert process.returncode == code, output
    assert time.monotonic() - began < 10.0
    assert_gone(family, within_s=0.5)


def test_c59_a_killed_launcher_takes_the_engine_along(tmp_path: Path) -> None:
    process = up(tmp_path)
    family = family_when(process, lambda: trained(tmp_path))
    process.kill()
    process.communicate()
    assert_gone(family, within_s=10.0)


def test_c112_a_finished_run_exits_by_itself_with_everything_in_place(tmp_path: Path) -> None:
    process = up(tmp_path, "learner.total_steps=3")
    family = family_when(process, lambda: trained(tmp_path, 3))
    began = time.monotonic()
    output, _ = process.communicate(timeout=60.0)
    assert process.returncode == 0, output
    assert time.monotonic() - began < 15.0  # a checkpoint, an export and a plot among them
    assert "balanced" in output
    assert "NOT balanced" not in output
    assert_gone(family, within_s=0.5)
    verify = [sys.executable, "-m", "launch.verify_run", str(tmp_path / "slipstream" / "quickstart")]
    verdict = subprocess.run([*verify, "--max-staleness", "1"], capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stdout
