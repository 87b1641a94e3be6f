"""A run that goes on says from where and with what; a complete one says so, and nothing is started."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from broker.connect import connect
from broker.messages import Frontier, Rules
from broker.serve import serve
from configs.load import load
from configs.run import RunConfig
from launch.cli import main
from launch.resumption import going_on, standing
from launch.run_folder import keep_config
from learners import lineage
from learners.checkpoint import MARKER, Checkpoints

STEPS = 7


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    return load("quickstart", [f"output_dir={tmp_path}", f"learner.total_steps={STEPS}", *overrides])


def trained(config: RunConfig, version: int = STEPS, *, exported: bool = True) -> Path:
    """A folder as a learner leaves it."""
    run_dir = Path(config.run_dir)
    keep_config(config)
    Checkpoints(run_dir / "checkpoints", keep=2).save(version, Frontier(), lambda path: None)
    if exported:
        (run_dir / "actor").mkdir(exist_ok=True)
        (run_dir / "actor" / "config.json").write_text("{}")
    return run_dir


def look(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a run's folder with its time and its bytes."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_run_is_complete_when_all_its_steps_are_saved_and_its_actor_is_exported_after_them(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert standing(config).version == 0
    trained(config, exported=False)
    assert not standing(config).complete
    trained(config)
    assert standing(config).complete
    assert not standing(config_of(tmp_path, "learner.total_steps=8")).complete
    assert not standing(config_of(tmp_path, "learner.checkpoint.resume=never")).complete
    trained(config, exported=False)  # a later run that died before its export
    assert not standing(config).complete


def test_going_back_to_an_older_checkpoint_is_something_to_do(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_dir = trained(config, 4, exported=False)
    trained(config)
    back = config_of(tmp_path, f"learner.checkpoint.resume={run_dir}/checkpoints/step_000004", "learner.total_steps=4")
    assert not standing(back).complete


@pytest.mark.parametrize("mode", ["processes", "serial"])
def test_up_on_a_complete_run_says_what_can_be_done_starts_nothing_and_changes_nothing(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = trained(config_of(tmp_path))
    before = look(run_dir)
    settings = [f"output_dir={tmp_path}", f"learner.total_steps={STEPS}", f"launch.mode={mode}"]
    assert main(["up", "-c", "quickstart", "rollout.max_staleness=2", *settings]) == 0
    said = capsys.readouterr().out
    assert f"complete at {STEPS} of {STEPS} steps" in said
    for way in ("learner.total_steps=", "learner.checkpoint.resume=never", "experiment=NAME"):
        assert way in said
    assert look(run_dir) == before


FILES = ("model.safetensors", "optimizer.safetensors", "policy.json", "rng-00000.safetensors")


@pytest.mark.parametrize("damage", ["removed", "truncated"])
@pytest.mark.parametrize("name", [*FILES, MARKER])
def test_c69_a_checkpoint_with_a_file_less_or_a_shorter_one_is_refused_by_name_and_nothing_is_started(
    name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(directory: Path) -> None:
        for file in FILES:
            (directory / file).write_text(file)

    config = config_of(tmp_path)
    keep_config(config)
    checkpoints = Checkpoints(Path(config.run_dir) / "checkpoints", keep=2)
    older, newer = (checkpoints.save(version, Frontier(), write) for version in (3, 5))
    if damage == "removed":
        (newer / name).unlink()
    else:
        (newer / name).write_bytes((newer / name).read_bytes()[:-3])
    if (name, damage) == (MARKER, "removed"):  # not complete: as if it had never been
        assert standing(config).checkpoint == older
        return
    before = look(Path(config.run_dir))
    for command in (["up"], ["up", "launch.mode=serial"], ["learner", "broker.url=tcp://127.0.0.1:9"]):
        assert main([*command, "-c", "quickstart", f"output_dir={tmp_path}", f"learner.total_steps={STEPS}"]) == 2
        said = capsys.readouterr().err
        assert f"{newer / name} is missing or has changed" in said
        assert "learner.checkpoint.resume" in said
    assert look(Path(config.run_dir)) == before


def test_a_run_that_goes_on_names_its_step_and_every_setting_that_is_another_one(tmp_path: Path) -> None:
    trained(config_of(tmp_path, "learner.checkpoint.resume=never"), 4)
    config = config_of(tmp_path, "rollout.max_staleness=2", "task.options.length=3", "broker.url=redis://:pw@h:1/0")
    first, *changes = going_on(config, standing(config))
    assert first.startswith(f"going on from step 4 of {STEPS} (")
    assert sorted(changes) == [
        'changed since: broker.backend: "zmq" -> "redis"',
        'changed since: broker.url: "" -> "redis://h:1/0"',
        "changed since: rollout.max_staleness: 1 -> 2",
        "changed since: task.options.length: not set -> 3",
    ]


def test_a_run_that_starts_anew_has_nothing_to_say(tmp_path: Path) -> None:
    config = config_of(tmp_path, "learner.checkpoint.resume=never")
    trained(config)
    assert going_on(config, standing(config)) == []


@pytest.mark.parametrize("command", [["up"], ["up", "launch.mode=serial"], ["learner", "broker.url=tcp://127.0.0.1:9"]])
def test_a_run_shorter_than_its_checkpoint_is_refused_and_nothing_changes(command: list[str], tmp_path: Path) -> None:
    run_dir = trained(config_of(tmp_path))
    before = look(run_dir)
    settings = [*command, "-c", "quickstart", f"output_dir={tmp_path}", "learner.total_steps=5"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launch.cli", *settings], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"learner.total_steps=5: {run_dir}/checkpoints/step_000007 is of step {STEPS} already" in done.stderr
    assert "Traceback" not in done.stderr
    assert look(run_dir) == before


@pytest.fixture
def url() -> Iterator[str]:
    """A broker that serves."""
    stop, ready, urls = threading.Event(), threading.Event(), list[str]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(target=lambda: serve(BrokerConfig(), ready=announce, stop=stop))
    thread.start()
    assert ready.wait(10)
    yield urls[0]
    stop.set()
    thread.join(10)


def learner(tmp_path: Path, url: str) -> subprocess.CompletedProcess[str]:
    settings = [
        f"output_dir={tmp_path}",
        f"learner.total_steps={STEPS}",
        "rollout.max_staleness=2",
        f"broker.url={url}",
    ]
    command = [sys.executable, "-P", "-m", "launch.cli", "learner", "-c", "quickstart", *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_learner_of_a_complete_run_says_so_and_lets_the_generators_go(tmp_path: Path, url: str) -> None:
    run_dir = trained(config_of(tmp_path))
    before, began = look(run_dir), time.monotonic()
    done = learner(tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 20
    assert f"complete at {STEPS} of {STEPS} steps" in done.stderr
    assert look(run_dir) == before
    client = connect(BrokerConfig(), url)
    assert "complete" in client.state().finished
    client.close()


def test_a_learner_of_a_complete_run_leaves_another_run_of_the_same_broker_alone(tmp_path: Path, url: str) -> None:
    run_dir = trained(config_of(tmp_path))
    lineage.keep(run_dir, lineage.Lineage(run="mine", incarnation=0))
    client = connect(BrokerConfig(), url)
    rules = Rules(
        max_staleness=1, on_stale="mask", groups_per_step=4, max_attempts=3, lease_timeout_s=30.0,
        member_timeout_s=10.0, run="another",
    )  # fmt: skip
    client.open_run(rules=rules, version=0, frontier=Frontier())
    done = learner(tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert "another run" in done.stderr
    assert client.state().finished == ""
    client.close()


def test_a_learner_of_a_complete_run_needs_no_broker(tmp_path: Path) -> None:
    trained(config_of(tmp_path))
    done = learner(tmp_path, "tcp://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
