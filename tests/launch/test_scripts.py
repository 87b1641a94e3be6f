"""The launch scripts find the command, on PATH or in their own checkout, or say what to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("broker", "learner", "generator")
pytestmark = pytest.mark.parametrize("role", ROLES)


def fake(path: Path, name: str) -> None:
    """A ``slipstream`` that says who it is and what it was given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho {name} "$@"\n')
    path.chmod(0o755)


def started(script: Path, *places: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script with the system's commands and ``places`` alone on PATH."""
    path = ":".join([*map(str, places), "/usr/bin", "/bin"])
    env = {"PATH": path, "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([script, "a.b=1"], capture_output=True, text=True, timeout=20, check=False, env=env, cwd=cwd)


@pytest.fixture
def script(role: str, tmp_path: Path) -> Path:
    """The role's script in a checkout without an environment."""
    target = tmp_path / "checkout" / "launch" / f"{role}.sh"
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / "launch" / f"{role}.sh", target)
    return target


def test_the_command_on_path_is_taken_first(role: str, script: Path, tmp_path: Path) -> None:
    fake(tmp_path / "bin" / "slipstream", "from-path")
    fake(script.parents[1] / ".venv" / "bin" / "slipstream", "from-checkout")
    done = started(script, tmp_path / "bin", cwd=tmp_path)
    assert done.stdout.split()[:2] == ["from-path", role]
    assert done.stdout.split()[-1] == "a.b=1"


def test_else_the_checkouts_own_is_found_from_any_directory(role: str, script: Path, tmp_path: Path) -> None:
    fake(script.parents[1] / ".venv" / "bin" / "slipstream", "from-checkout")
    done = started(script, cwd=tmp_path)
    assert done.stdout.split()[:2] == ["from-checkout", role], done.stderr


def test_without_either_it_says_what_to_do(role: str, script: Path, tmp_path: Path) -> None:
    done = started(script, cwd=tmp_path)
    assert done.returncode == 127
    assert "make .venv/.ready" in done.stderr
    assert "activate" in done.stderr
