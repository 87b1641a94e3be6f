"""``slipstream doctor`` on this machine, and on one that is not well."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load
from generators.scoring import RewardFailed
from launch import environment
from launch.doctor import Patient, task
from launch.parity import Parity, ParityError


def doctor(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "launch.cli", "doctor", f"output_dir={tmp_path}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_healthy_machine_passes_every_check_with_real_weights_through_a_real_engine(tmp_path: Path) -> None:
    done = doctor(tmp_path, "generator.engine=vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed 7/7"
    assert "vllm and the learner's model agree" in done.stdout
    told = done.stdout.splitlines()
    assert [line for line in told[:-1] if not line.startswith("ok    ")] == [], "nothing but the checks' own lines"


@pytest.mark.slow
def test_the_fix_of_everything_that_is_wrong_is_named(tmp_path: Path) -> None:
    wrong = ["task.prompts=tasks.digit:prompts", "broker.url=tcp://127.0.0.1:9", "broker.reconnect_timeout_s=0.5"]
    done = doctor(tmp_path, *wrong, "model.path=/nowhere", "generator.engine=transformers")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "passed 3/7"
    for part in ("did you mean 'tasks.digits'?", "fix: set task.prompts", "fix: set broker.url", "fix: set model.path"):
        assert part in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_what_libraries_print_is_shown_with_a_check_that_failed_and_with_no_other(tmp_path: Path) -> None:
    script = (
        "import argparse, os, subprocess, sys; from launch import doctor\n"
        "def noisy(patient):\n"
        "    print('python prints'); os.write(2, b'C prints\\n'); subprocess.run(['echo', 'a child prints'])\n"
        "    return 'well'\n"
        "def failing(patient):\n"
        "    noisy(patient); raise doctor.Unwell('not well')\n"
        "doctor.CHECKS = tuple((c.__name__, c, 'rest') for c in {checks})\n"
        "args = argparse.Namespace(config='quickstart', overrides=[])\n"
        "sys.exit(doctor.run(args))\n"
    )

    def told(checks: str) -> str:
        code = script.replace("{checks}", checks)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
        )
        assert done.stderr == ""
        return done.stdout

    assert told("(noisy,)") == "ok    noisy: well\npassed 1/1\n"
    first, *printed, fix, second, last = told("(failing, noisy)").splitlines()
    assert (first, fix.strip()) == ("FAIL  failing: Unwell: not well", "fix: rest")
    assert sorted(printed) == ["      | " + line for line in ("C prints", "a child prints", "python prints")]
    assert (second, last) == ("ok    noisy: well", "passed 1/2")


def test_the_task_check_calls_the_rewards_and_reports_what_they_raise(tmp_path: Path) -> None:
    rewards = tmp_path / "mine.py"
    rewards.write_text(
        "import asyncio\n"
        "def broken(text, answer, reference):\n    return 1 / len(answer)\n"
        "async def slow(text, answer, reference):\n    await asyncio.sleep(0)\n    return float(answer == reference)\n"
    )

    def patient(name: str) -> Patient:
        config = load("quickstart", [f"output_dir={tmp_path}", f"task.rewards.exact={rewards}:{name}"])
        return Patient(config=config, given_url="", asking=environment.placed(config))

    with pytest.raises(RewardFailed, match=r"'exact': ZeroDivisionError: division by zero \(mine\.py:3\)"):
        task(patient("broken"))
    assert task(patient("slow")).endswith("0 for an empty answer, 1 for the first reference")


def test_differences_beyond_rounding_are_refused() -> None:
    Parity(tokens=10, largest=1e-4, mean=1e-5).check("float32")
    Parity(tokens=10, largest=0.2, mean=0.05).check("bfloat16")
    with pytest.raises(ParityError, match=r"by up to 0\.81 nats"):
        Parity(tokens=10, largest=0.81, mean=0.01).check("float32")
    with pytest.raises(ParityError, match="on average"):
        Parity(tokens=10, largest=0.2, mean=0.2).check("bfloat16")
    with pytest.raises(ParityError):
        Parity(tokens=10, largest=float("nan"), mean=float("nan")).check("float32")
