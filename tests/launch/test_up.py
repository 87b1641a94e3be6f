"""What ``slipstream up`` does before anything is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from broker.messages import Frontier
from configs.load import ConfigError, load
from launch.up import prepare
from learners.checkpoint import Checkpoints


def test_the_runs_folder_holds_the_configuration_that_its_processes_load(tmp_path: Path) -> None:
    config = load("quickstart", [f"output_dir={tmp_path}", "learner.total_steps=7", "broker.url=redis://:pw@h:1/0"])
    run_dir = prepare(config)
    assert run_dir == tmp_path / "slipstream" / "quickstart"
    written = load(run_dir / "config.yaml")
    assert written.learner.total_steps == 7
    assert "pw" not in (run_dir / "config.yaml").read_text()


def test_a_run_that_starts_anew_begins_with_new_files_and_one_that_goes_on_keeps_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    metrics, log = run_dir / "logs" / "metrics.jsonl", run_dir / "logs" / "gen0.log"
    metrics.parent.mkdir(parents=True)
    for begun in ("first", "second"):
        metrics.write_text('{"step": 1}\n')
        log.write_text(begun)
        prepare_elsewhere(tmp_path, "auto")  # there is no checkpoint: nothing goes on
        assert not metrics.is_file() and not log.is_file()
        assert log.with_name("gen0.log.1").read_text() == begun
    metrics.write_text('{"step": 1}\n')
    log.write_text("third")
    Checkpoints(run_dir / "checkpoints", keep=1).save(1, Frontier(), lambda path: None)
    prepare_elsewhere(tmp_path, "auto")
    assert metrics.is_file()
    assert log.read_text() == "third"
    prepare_elsewhere(tmp_path, "never")
    assert not metrics.is_file() and not log.is_file()
    assert sorted(path.name for path in log.parent.glob("gen0*")) == ["gen0.log.1"]


def prepare_elsewhere(tmp_path: Path, resume: str) -> None:
    """In a process of its own, with which the claim on the folder ends."""
    overrides = [f"output_dir={tmp_path}", f"learner.checkpoint.resume={resume}"]
    script = f"from configs.load import load; from launch.up import prepare; prepare(load('quickstart', {overrides!r}))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    config = load("quickstart", [f"output_dir={tmp_path}"])
    prepare(config)
    with pytest.raises(ConfigError, match="another run is going on"):
        prepare(config)
    prepare(load("quickstart", [f"output_dir={tmp_path}", "experiment=other"]))
