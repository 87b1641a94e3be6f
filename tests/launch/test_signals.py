"""What a signal does to one process."""

import signal
import subprocess
import sys
import time

import pytest

UNWINDS = """
import time
from launch.signals import Stopped, guard, on_stop, raise_stopped
guard(30.0)
try:
    on_stop(raise_stopped)
    print("up", flush=True)
    time.sleep(60)
except Stopped as stopped:
    print("torn down", flush=True)
    raise SystemExit(stopped.exit_code)
"""
# The main thread takes no notice, as when it sits in a collective.
BLOCKED = """
import ctypes
from launch.signals import guard, on_stop
guard(0.3)
on_stop(lambda signum: None)
print("up", flush=True)
libc = ctypes.CDLL(None)
while True:
    libc.usleep(1_000_000 - 1)
"""


def started(script: str, *, own_group: bool = False) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=own_group)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_main_thread_unwinds_and_the_exit_code_names_the_signal(signum: signal.Signals, code: int) -> None:
    process = started(UNWINDS)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (code, b"torn down\n")


def test_a_process_that_does_not_unwind_is_ended_by_its_guard() -> None:
    process = started(BLOCKED)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert time.monotonic() - began < 10.0


def test_the_guard_of_a_group_leader_takes_the_group_along() -> None:
    process = started(BLOCKED, own_group=True)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL


def test_nohup_is_respected() -> None:
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + UNWINDS
    process = started(script)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
