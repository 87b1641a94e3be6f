"""What a signal does to one process."""

import signal
import subprocess
import sys
import time

import pytest

ENDS = """
import time
from launch.signals import SignalWatch
SignalWatch(30.0)
print("up", flush=True)
while True:
    try:
        time.sleep(60)
    except BaseException:  # as foreign code does
        continue
"""
# The main thread sits in foreign code, as in a collective, and what was asked of it does not end it.
BLOCKED = """
import ctypes
from launch.signals import SignalWatch
SignalWatch(0.3, lambda signum: None)
print("up", flush=True)
while True:
    ctypes.CDLL(None).usleep(900_000)
"""
ACTS = """
import threading
from launch.signals import SignalWatch
stop = threading.Event()
watch = SignalWatch(30.0)
watch.act = lambda signum: stop.set()
print("up", flush=True)
stop.wait()
raise SystemExit(128 + watch.signum)
"""


def started(script: str, *, own_group: bool = False) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=own_group)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_process_ends_at_once_and_its_exit_code_names_the_signal(signum: signal.Signals, code: int) -> None:
    process = started(ENDS)
    process.send_signal(signum)
    try:
        process.communicate(timeout=20)
    finally:
        process.kill()  # if it has not ended, it must not stand in the way of the tests that count processes
    assert process.returncode == code


def test_what_is_asked_for_happens_while_the_main_thread_waits() -> None:
    process = started(ACTS)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_process_that_takes_no_notice_is_ended_by_its_guard() -> None:
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
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + ENDS
    process = started(script)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
