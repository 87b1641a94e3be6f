"""Who may write into a run's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from launch.run_folder import LAUNCHER, LEARNER, claim
from launch.up import prepare


@contextmanager
def held(run_dir: Path, role: str) -> Iterator[None]:
    descriptor = claim(run_dir, role)
    yield
    os.close(descriptor)


def run_dir_with_metrics(tmp_path: Path) -> Path:
    metrics = tmp_path / "slipstream" / "quickstart" / "logs" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1}\n')
    return metrics.parent.parent


def refused(tmp_path: Path, *command: str) -> None:
    settings = [*command, "-c", "quickstart", f"output_dir={tmp_path}", "learner.checkpoint.resume=never"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launch.cli", *settings], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"another run is going on in {tmp_path}/slipstream/quickstart" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_has_one_launcher_and_one_learner_which_do_not_stand_in_each_others_way(tmp_path: Path) -> None:
    with held(tmp_path, LAUNCHER), held(tmp_path, LEARNER):
        for role in (LAUNCHER, LEARNER):
            with pytest.raises(ConfigError, match=f"another run is going on in {tmp_path}"):
                claim(tmp_path, role)
    with held(tmp_path, LAUNCHER), held(tmp_path, LEARNER):
        pass


def test_a_claim_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from launch.run_folder import LEARNER, claim\nclaim(pathlib.Path(sys.argv[1]), LEARNER)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script + "print('held', flush=True)\ninput()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError):
        claim(tmp_path, LEARNER)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with held(tmp_path, LEARNER):
        pass


def test_a_second_learner_is_refused_and_the_first_ones_metrics_stay(tmp_path: Path) -> None:
    run_dir = run_dir_with_metrics(tmp_path)
    with held(run_dir, LEARNER):
        refused(tmp_path, "learner", "learner.ranks=1", "broker.url=tcp://127.0.0.1:9")
    assert (run_dir / "logs" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_launcher_is_refused_where_a_learner_was_started_by_itself(tmp_path: Path) -> None:
    run_dir = run_dir_with_metrics(tmp_path)
    with held(run_dir, LEARNER):
        refused(tmp_path, "up")
    assert (run_dir / "logs" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_the_learner_of_a_launcher_finds_the_folder_free(tmp_path: Path) -> None:
    run_dir = prepare(load("quickstart", [f"output_dir={tmp_path}"]))
    with held(run_dir, LEARNER):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("role", [LAUNCHER, LEARNER])
def test_a_serial_run_is_refused_beside_any_other(role: str, tmp_path: Path) -> None:
    with held(run_dir_with_metrics(tmp_path), role):
        refused(tmp_path, "up", "launch.mode=serial", "learner.ranks=1", "generator.engine=transformers")
