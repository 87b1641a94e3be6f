"""Ctrl-C and SIGTERM at any moment: everything is down within 10 s, and a rerun starts cleanly (C111, C59)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.running import SMALL, Running, metrics, stop_signal

pytestmark = pytest.mark.slow


def arguments(directory: Path, *more: str) -> tuple[str, ...]:
    return (
        "up", "-c", "quickstart", f"output_dir={directory}", "generator.engine=transformers", "generator.count=1",
        "learner.total_steps=1000", *SMALL, *more,
    )  # fmt: skip


def test_c111_interrupted_at_start_up(start: Callable[..., Running], tmp_path: Path) -> None:
    run = start("up", "-c", "quickstart", f"output_dir={tmp_path}", *SMALL)  # vLLM: the slowest to start
    run.until(lambda: len(run.tree()) >= 6, 60, "all roles started")
    assert stop_signal(run, signal.SIGINT) < 10.0
    assert run.process.returncode == 130


def test_c111_interrupted_in_mid_step_then_a_rerun_starts_cleanly(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    run = start(*arguments(tmp_path, "learner.delay_s=0.5"))
    run.until(lambda: len(metrics(run_dir)) >= 2, 120, "two steps")
    assert stop_signal(run, signal.SIGINT) < 10.0
    assert run.process.returncode == 130
    again = start(*arguments(tmp_path, "learner.total_steps=2", "learner.checkpoint.resume=never"))
    assert again.wait(120) == 0, again.text()[-3000:]


def test_c111_terminated_in_mid_save(start: Callable[..., Running], tmp_path: Path) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    run = start(*arguments(tmp_path, "learner.checkpoint.every_steps=1"))
    run.until(lambda: any(run_dir.glob("checkpoints/.tmp-*")), 120, "a save under way")
    assert stop_signal(run, signal.SIGTERM) < 10.0
    assert run.process.returncode == 143
    again = start(*arguments(tmp_path, "learner.total_steps=60", "learner.checkpoint.every_steps=20"))
    again.until(lambda: "going on from" in _log(run_dir) or len(metrics(run_dir)) > 0, 120, "the rerun's first steps")


def test_c59_a_killed_launcher_leaves_no_process(start: Callable[..., Running], tmp_path: Path) -> None:
    run = start("up", "-c", "quickstart", f"output_dir={tmp_path}", *SMALL)
    run.until(lambda: (tmp_path / "slipstream/quickstart/logs/metrics.jsonl").is_file(), 120, "the learner's log file")
    began = time.monotonic()
    run.process.kill()
    run.process.wait()
    psutil.wait_procs(run.tree(), timeout=10)
    assert not run.tree(), [one.cmdline() for one in run.tree()]
    assert time.monotonic() - began < 10.0


def _log(run_dir: Path) -> str:
    return (run_dir / "logs" / "learner.log").read_text()
