"""What is wrong with the settings is told before anything is started: exit code 2, key, value, what is legal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from broker.messages import Frontier
from configs.load import ConfigError, load
from launch import preflight
from launch.preflight import check_access, check_generator, check_learner, check_run
from learners.checkpoint import Checkpoints

CORES = len(os.sched_getaffinity(0))
RUN, LEARNER, GENERATOR = "up", "learner", "generator"
TASK = """
def prompts(split, seed, options):
    return []

def raises(split, seed, options):
    return options["size"]

def reward(text, answer, reference):
    return 1.0
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A task that can be loaded, and one that cannot."""
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "broken.py").write_text("import no_such_thing_at_all\n")
    return tmp_path


WRONG = [
    ("task.prompts=nofile.py:prompts", (RUN, LEARNER), ("task.prompts", "nofile.py")),
    ("task.prompts=tasks.counting:promts", (RUN, LEARNER), ("task.prompts", "did you mean 'prompts'")),
    ("task.prompts=nope", (RUN, LEARNER), ("task.prompts", "'nope'", "module:function or file.py:function")),
    ("task.prompts={dir}/broken.py:prompts", (RUN, LEARNER), ("task.prompts", "no_such_thing_at_all", "broken.py:1")),
    ("task.prompts={dir}/mine.py:prompts", (RUN,), ("task.prompts", "no prompt for the split 'train'")),
    ("task.prompts={dir}/mine.py:raises", (RUN,), ("task.prompts", "KeyError: 'size' (mine.py:6)")),
    ("task.options.length=0", (RUN,), ("task.options", "at least 1")),
    ("task.rewards.exact=tasks.counting:rewrd", (RUN, GENERATOR), ("task.rewards.exact", "did you mean 'reward'")),
    ("task.rewards.exact={dir}/broken.py:reward", (RUN, GENERATOR), ("task.rewards.exact", "no_such_thing_at_all")),
    ("model.path=/nonexistent", (RUN, LEARNER, GENERATOR), ("model.path", "/nonexistent", "'tiny'", "owner/name")),
    ("model.path={dir}", (RUN, LEARNER, GENERATOR), ("model.path", "no config.json")),
    ("model.path=package:no_such", (RUN, LEARNER, GENERATOR), ("model.path", "not installed")),
    (
        f"generator.tensor_parallel_size={CORES + 1}",
        (RUN, GENERATOR),
        ("tensor_parallel_size", f"use {CORES}"),
    ),
    ("model.tiny_hidden_size=48", (RUN, LEARNER, GENERATOR), ("model.tiny_hidden_size", "48", "multiple of 32")),
    ("algorithm.loss={dir}/mine.py:los", (RUN, LEARNER), ("algorithm.loss", "no function 'los'")),
    ("algorithm.advantage={dir}/broken.py:f", (RUN, LEARNER), ("algorithm.advantage", "no_such_thing_at_all")),
    ("algorithm.loss_mean=nofile.py:f", (RUN, LEARNER), ("algorithm.loss_mean", "nofile.py")),
    ("algorithm.correction.kind=nofile.py:f", (RUN, LEARNER), ("algorithm.correction.kind", "nofile.py")),
    ("learner.checkpoint.resume=./banana", (RUN, LEARNER), ("learner.checkpoint.resume=./banana", "auto", "never")),
    ("learner.checkpoint.resume={dir}", (RUN, LEARNER), ("learner.checkpoint.resume=", "complete.json")),
]
CASES = [(setting, role, parts) for setting, roles, parts in WRONG for role in roles]


@pytest.mark.parametrize(("setting", "role", "parts"), CASES, ids=[f"{role}-{setting}" for setting, role, _ in CASES])
def test_each_role_finds_what_is_wrong_with_its_part(
    setting: str, role: str, parts: tuple[str, ...], files: Path
) -> None:
    check = {RUN: check_run, LEARNER: check_learner, GENERATOR: check_generator}[role]
    config = load("quickstart", [f"output_dir={files}", setting.format(dir=files)])
    with pytest.raises(Exception) as caught:
        check(config)
    assert type(caught.value).__name__ in ("ConfigError", "TaskError"), "the two that exit with 2"
    for part in parts:
        assert part in str(caught.value)


def test_what_is_right_passes_and_nothing_is_built_for_it(tmp_path: Path) -> None:
    done = Checkpoints(tmp_path / "other", keep=1).save(1, Frontier(), lambda path: None)
    before = sorted(tmp_path.rglob("*"))
    for resume in ("auto", "never", str(done)):
        config = load("quickstart", [f"output_dir={tmp_path}", f"learner.checkpoint.resume={resume}"])
        for check in (check_run, check_learner, check_generator):
            check(config)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_role_needs_only_what_it_uses_itself(tmp_path: Path) -> None:
    config = load("quickstart", [f"output_dir={tmp_path}", "task.rewards.exact=elsewhere.py:reward"])
    check_learner(config)
    config = load("quickstart", [f"output_dir={tmp_path}", "task.prompts=elsewhere.py:prompts"])
    check_generator(config)


@pytest.mark.parametrize("command", ["up", "learner", "generator"])
def test_the_commands_end_at_once_with_2_and_leave_nothing(command: str, tmp_path: Path) -> None:
    wrong = ["model.path=/nonexistent", "broker.url=tcp://127.0.0.1:9", f"output_dir={tmp_path}"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launch.cli", command, "-c", "quickstart", *wrong],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "slipstream: model.path: '/nonexistent'" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", ["check_run", "check_learner", "check_generator"])
def test_no_check_costs_a_heavy_import(check: str) -> None:
    script = (
        f"import sys; from launch.preflight import {check}; from configs.load import load\n"
        f"{check}(load('quickstart'))\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'deepspeed', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


UNREADABLE = [
    ("tcp://10.0.0.5:1", "broker.key_file = {dir}/nowhere.key: No such file or directory"),
    ("rediss://h:1/0?ssl_ca_certs=/nowhere.pem", "broker.url: ssl_ca_certs=/nowhere.pem cannot be read"),
]


@pytest.mark.parametrize("command", ["learner", "generator"])
@pytest.mark.parametrize(("url", "told"), UNREADABLE)
def test_a_role_that_cannot_get_in_says_so_once_before_anything_loads(
    command: str, url: str, told: str, tmp_path: Path
) -> None:
    script = (
        "import sys; from launch.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, sorted({'torch', 'vllm', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    settings = [f"broker.url={url}", f"broker.key_file={tmp_path}/nowhere.key", f"output_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", script, command, *settings], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "1 []\n", done.stderr
    assert done.stderr.startswith("slipstream: BrokerError: ")
    assert done.stderr.count(told.format(dir=tmp_path)) == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_host_that_is_not_known_yet_is_told_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    check_access(BrokerConfig(), "redis://:hunter2@nobody.invalid:1/0")
    assert "nobody.invalid does not resolve" in caplog.text and "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("libaio", "folder", "named"),
    [
        (None, ".", ("offload_optimizer=nvme", "libaio-dev")),
        ("libaio.so.1", "not_there", ("learner.offload_dir", "not_there")),
        ("libaio.so.1", ".", ()),
    ],
)
def test_offloading_to_nvme_needs_libaio_and_a_folder(
    libaio: str | None, folder: str, named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_library", {"aio": libaio}.get)
    config = load("quickstart", ["learner.offload_optimizer=nvme", f"learner.offload_dir={tmp_path / folder}"])
    with pytest.raises(ConfigError) if named else nullcontext() as caught:
        check_learner(config)
    assert all(part in str(caught.value) for part in named if caught)
