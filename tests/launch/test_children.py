"""Child processes end when they should, and take theirs with them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.children import Child, Children
from launch.signals import Stopped

# Each script says on its output that it has got where the test wants it.
SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
# A parent whose own child is stubborn; it prints that child's process id.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def start(children: Children, name: str, script: str, log: Path) -> tuple[Child, str]:
    """A child that has printed its first line, and that line."""
    child = children.start(name, [sys.executable, "-c", script], env=os.environ, log=log)
    return child, first_line(log)


def first_line(log: Path, timeout_s: float = 20.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not (log.is_file() and "\n" in (text := log.read_text())):
        assert time.monotonic() < deadline, "the child has not started"
    return text.partition("\n")[0]


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    """Whether the process ends within the time; a zombie has ended."""
    try:
        psutil.Process(pid).wait(timeout=timeout_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_wait_returns_the_child_that_ended_and_its_exit_code(tmp_path: Path) -> None:
    with Children(5.0) as children:
        children.start("a", [sys.executable, "-c", "raise SystemExit(7)"], env=os.environ, log=tmp_path / "a.log")
        ended = children.wait(20.0)
        assert ended is not None
        assert (ended.name, ended.exit_code) == ("a", 7)
        assert children.running() == []
        assert children.wait(0.0) is None


def test_a_killed_child_has_the_exit_code_that_a_shell_shows(tmp_path: Path) -> None:
    with Children(5.0) as children:
        child, _ = start(children, "a", SLEEPS, tmp_path / "a.log")
        child.process.kill()
        ended = children.wait(20.0)
        assert ended is not None
        assert ended.exit_code == 137


def test_leaving_stops_everyone_and_kills_the_stubborn_at_the_deadline(tmp_path: Path) -> None:
    with Children(0.5) as children:
        polite, _ = start(children, "a", SLEEPS, tmp_path / "a.log")
        stubborn, _ = start(children, "b", STUBBORN, tmp_path / "b.log")
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    assert (polite.exit_code, stubborn.exit_code) == (143, 137)


def test_stopping_by_name_leaves_the_others(tmp_path: Path) -> None:
    with Children(5.0) as children:
        start(children, "gen0", SLEEPS, tmp_path / "a.log")
        start(children, "learner", SLEEPS, tmp_path / "b.log")
        children.stop("gen")
        assert [child.name for child in children.running()] == ["learner"]


def test_c59_what_a_killed_child_has_started_ends_with_it(tmp_path: Path) -> None:
    with Children(5.0) as children:
        child, grandchild = start(children, "a", PARENT, tmp_path / "a.log")
        child.process.kill()
        assert children.wait(20.0) is child
        assert gone(int(grandchild))


def test_a_grandchild_that_ignores_sigterm_ends_at_the_stop(tmp_path: Path) -> None:
    with Children(5.0) as children:
        _, grandchild = start(children, "a", PARENT, tmp_path / "a.log")
    assert gone(int(grandchild))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_wait_and_everyone(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    with pytest.raises(Stopped) as stopped, Children(5.0) as children:
        child, _ = start(children, "a", SLEEPS, tmp_path / "a.log")
        os.kill(os.getpid(), signum)
        children.wait(20.0)
    assert stopped.value.exit_code == code
    assert child.exit_code == 143


def test_a_second_signal_does_not_wait_for_the_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Stopped), Children(60.0) as children:
        start(children, "a", STUBBORN, tmp_path / "a.log")
        os.kill(os.getpid(), signal.SIGINT)
        try:
            children.wait(20.0)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
    assert time.monotonic() - began < 20.0


def test_c59_children_on_a_leash_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    leashed = "import os, time; from broker.lifetime import die_with; die_with(int(os.environ['SLIPSTREAM_PARENT']));"
    leashed += "print(os.getpid(), flush=True); time.sleep(60)"
    launcher = f"""
import sys, time
from pathlib import Path
from launch.children import Children
from launch.environment import child
from broker.lifetime import leashed
with Children(60.0) as children:
    children.start("a", [sys.executable, "-c", {leashed!r}], env=child(), log=Path({str(tmp_path / "a.log")!r}))
    children.start("b", leashed([sys.executable, "-c", {SLEEPS!r}]), env=child(), log=Path({str(tmp_path / "b.log")!r}))
    children.wait(60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher])
    pid = int(first_line(tmp_path / "a.log"))
    first_line(tmp_path / "b.log")
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert gone(pid)
    assert {each.pid for each in family} >= {pid}
    assert all(gone(each.pid) for each in family)


def test_a_leash_to_a_parent_that_is_gone_ends_the_process_at_once() -> None:
    script = "from broker.lifetime import die_with; die_with(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (137, b"")
