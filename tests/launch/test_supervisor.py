"""The launcher's policy, with roles that are a few lines of Python."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from configs.load import load
from configs.run import RunConfig
from launch.children import Children
from launch.signals import Stopped
from launch.supervisor import Heartbeat, NoProgress, RoleFailed, Supervisor, last_error, tail

BROKER = (
    "import os, time; os.write(int(os.environ['SLIPSTREAM_READY_FD']), b'tcp://127.0.0.1:1\\n');"
    " os.close(int(os.environ['SLIPSTREAM_READY_FD'])); time.sleep(60)"
)
SLEEPS = "import time; time.sleep(60)"
ALWAYS = Heartbeat(last_progress=time.monotonic, obstacle=lambda: "nothing")


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    return load("quickstart", [f"output_dir={tmp_path}", "launch.stop_timeout_s=2.0", "generator.count=1", *overrides])


def supervise(
    config: RunConfig, tmp_path: Path, roles: dict[str, str], heartbeat: Heartbeat = ALWAYS
) -> tuple[list[tuple[str, ...]], float]:
    """Runs the roles' scripts under the supervisor; returns the commands asked for, and how long it took."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    asked: list[tuple[str, ...]] = []

    def command(role: str, config_file: Path, *arguments: str) -> Sequence[str]:
        asked.append((role, *arguments))
        return [sys.executable, "-c", roles[role]]

    began = time.monotonic()
    with Children(config.launch.stop_timeout_s) as children:
        supervisor = Supervisor(config, tmp_path / "config.yaml", children, command=command)
        supervisor.start_broker()
        supervisor.start_roles()
        supervisor.watch(heartbeat)
    return asked, time.monotonic() - began


def roles_left() -> list[psutil.Process]:
    """Roles of a supervisor under test that are alive; other tests have servers of their own in this process."""
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if "time.sleep(60)" in " ".join(one.cmdline())]


def test_c112_a_finished_learner_ends_everyone_within_ten_seconds(tmp_path: Path) -> None:
    config = config_of(tmp_path, "generator.count=2")
    asked, took = supervise(config, tmp_path, {"broker": BROKER, "learner": "pass", "generator": SLEEPS})
    assert asked == [("broker",), ("learner",), ("generator", "--id", "gen0"), ("generator", "--id", "gen1")]
    assert took < 10.0
    assert roles_left() == []


def test_roles_learn_the_url_from_their_environment_and_not_from_their_arguments(tmp_path: Path) -> None:
    check = "import os, sys; sys.exit(os.environ['SLIPSTREAM_BROKER_URL'] != 'redis://:hunter2@h:1/0')"
    config = config_of(tmp_path, "broker.url=redis://:hunter2@h:1/0")
    asked, _ = supervise(config, tmp_path, {"learner": check, "generator": SLEEPS})
    assert asked[0] == ("learner",)  # and no broker of our own beside a given one
    assert "hunter2" not in str(asked)


def test_the_learner_is_told_that_its_steps_are_shown(tmp_path: Path) -> None:
    check = "import os, sys; sys.exit(not os.environ.get('SLIPSTREAM_STEPS_SHOWN'))"
    supervise(config_of(tmp_path), tmp_path, {"broker": BROKER, "learner": check, "generator": SLEEPS})


def test_a_learner_that_fails_ends_the_run_with_its_own_error_and_code(tmp_path: Path) -> None:
    learner = "import sys; print('the real reason', file=sys.stderr); sys.exit(9)"
    with pytest.raises(RoleFailed, match="learner ended with exit code 9") as caught:
        supervise(config_of(tmp_path), tmp_path, {"broker": BROKER, "learner": learner, "generator": SLEEPS})
    assert "the real reason" in str(caught.value)
    assert caught.value.exit_code == 9


def test_what_a_log_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    (log := tmp_path / "gen0.log").write_bytes(b"one\nslipstream: \x1b[2Jtwo\n")
    assert tail(log) == "  | one\n  | slipstream: \\x1b[2Jtwo"
    assert last_error(log) == "slipstream: \\x1b[2Jtwo"


def test_a_killed_broker_comes_back_at_its_old_address(tmp_path: Path) -> None:
    # It dies once the learner runs, and the learner finishes once the second broker has left its mark.
    running, mark = tmp_path / "running", tmp_path / "mark"
    broker = (
        "import os, pathlib, time; fd = os.environ.get('SLIPSTREAM_READY_FD')\n"
        "assert 'SLIPSTREAM_BROKER_URL' not in os.environ\n"
        "if fd:\n"
        "    os.write(int(fd), b'tcp://127.0.0.1:4321\\n')\n"
        f"    while not pathlib.Path({str(running)!r}).exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        f"pathlib.Path({str(mark)!r}).touch(); time.sleep(60)"
    )
    learner = (
        f"import pathlib, time\npathlib.Path({str(running)!r}).touch()\n"
        f"while not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)"
    )
    asked, _ = supervise(config_of(tmp_path), tmp_path, {"broker": broker, "learner": learner, "generator": SLEEPS})
    assert [words for words in asked if words[0] == "broker"] == [("broker",), ("broker", "broker.port=4321")]


def test_our_broker_is_never_told_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_BROKER_URL", "tcp://127.0.0.1:9")
    alone = "import os; assert 'SLIPSTREAM_BROKER_URL' not in os.environ\n"
    supervise(config_of(tmp_path), tmp_path, {"broker": alone + BROKER, "learner": "pass", "generator": SLEEPS})


def test_a_killed_redis_broker_ends_the_run_because_the_next_one_would_have_another_password(tmp_path: Path) -> None:
    broker = BROKER.replace("tcp://127.0.0.1:1", "redis://:pw@127.0.0.1:1/0").replace(
        "time.sleep(60)", "os.kill(os.getpid(), 9)"
    )
    with pytest.raises(RoleFailed, match="broker ended with exit code 137"):
        supervise(config_of(tmp_path), tmp_path, {"broker": broker, "learner": SLEEPS, "generator": SLEEPS})


@pytest.mark.parametrize(
    ("broker", "error"),
    [
        ("import sys; sys.exit('port 6379 is taken')", "port 6379 is taken"),
        ("import os, time; os.close(int(os.environ['SLIPSTREAM_READY_FD'])); time.sleep(60)", "without a word"),
    ],
)
def test_a_broker_that_does_not_get_ready_is_the_error(broker: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(RoleFailed, match=error):
        supervise(config_of(tmp_path), tmp_path, {"broker": broker, "learner": SLEEPS, "generator": SLEEPS})


def test_a_generator_that_dies_is_started_again_under_its_name(tmp_path: Path) -> None:
    # The learner finishes when the generator's second life has left its mark.
    mark = tmp_path / "mark"
    generator = (
        f"import pathlib, sys, time; m = pathlib.Path({str(mark)!r}); f = m.with_suffix('.first');\n"
        "if not f.exists(): f.touch(); sys.exit(1)\n"
        "m.touch(); time.sleep(60)"
    )
    learner = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)"
    asked, _ = supervise(config_of(tmp_path), tmp_path, {"broker": BROKER, "learner": learner, "generator": generator})
    assert asked.count(("generator", "--id", "gen0")) == 2


def test_a_generator_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    generator = "import sys; print('no memory', file=sys.stderr); sys.exit(5)"
    with pytest.raises(RoleFailed, match="gen0 ended with exit code 5") as caught:
        supervise(config_of(tmp_path), tmp_path, {"broker": BROKER, "learner": SLEEPS, "generator": generator})
    assert str(caught.value).count("no memory") == 4  # the first life and three more


def test_the_notice_of_a_restart_says_what_this_life_died_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gen0.log").write_text("Traceback (most recent call last):\nOldError: of an earlier run\n")
    mark = tmp_path / "mark"
    generator = (
        f"import atexit, pathlib; m = pathlib.Path({str(mark)!r})\n"
        "if m.exists(): raise SystemExit(0)\n"
        "m.touch(); print('loading'); atexit.register(print, 'closed', flush=True)\n"
        "raise ZeroDivisionError('in the reward')"
    )
    learner = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)\ntime.sleep(1)"
    supervise(config_of(tmp_path), tmp_path, {"broker": BROKER, "learner": learner, "generator": generator})
    told = capsys.readouterr().err
    assert "gen0 ended with exit code 1; restart 1 of 3" in told
    assert "ZeroDivisionError: in the reward" in told
    assert "OldError" not in told


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("a\nTraceback (most recent call last):\n  File x\n    y\nBadError: why\n  more\nbye\n", "BadError: why"),
        ("Traceback (most recent call last):\nA: 1\n\nTraceback (most recent call last):\n  f\nB: 2\n", "B: 2"),
        ("slipstream: task.prompts: no\nlater\n", "slipstream: task.prompts: no"),
        ("12:00 gen0 ERROR x: broken\nlater\n", "12:00 gen0 ERROR x: broken"),
        ("just words\n\n", "just words"),
        ("", ""),
    ],
)
def test_the_last_error_of_a_log_is_its_last_traceback_or_its_last_words(log: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(log)
    assert last_error(tmp_path / "x.log") == error
    assert last_error(tmp_path / "nowhere.log") == ""


def test_a_generator_with_a_wrong_configuration_is_not_started_again(tmp_path: Path) -> None:
    generator = "import sys; print('unknown key', file=sys.stderr); sys.exit(2)"
    with pytest.raises(RoleFailed, match="gen0 ended with exit code 2") as caught:
        supervise(config_of(tmp_path), tmp_path, {"broker": BROKER, "learner": SLEEPS, "generator": generator})
    assert str(caught.value).count("unknown key") == 1


def test_c42_a_run_that_stands_still_ends_with_what_is_in_the_way(tmp_path: Path) -> None:
    began = time.monotonic()
    stuck = Heartbeat(last_progress=lambda: began, obstacle=lambda: "gen0 gone (no memory)")
    config = config_of(tmp_path, "launch.watchdog_s=0.5")
    with pytest.raises(NoProgress, match=r"launch\.watchdog_s = 0\.5.*gen0 gone \(no memory\)"):
        supervise(config, tmp_path, {"broker": BROKER, "learner": SLEEPS, "generator": SLEEPS}, stuck)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["start-up", "mid-step"])
def test_c111_a_signal_takes_the_whole_tree_down(
    signum: signal.Signals, code: int, moment: str, tmp_path: Path
) -> None:
    kill = f"import os; os.kill(os.getppid(), {int(signum)})\n"
    roles = {"broker": BROKER, "learner": SLEEPS, "generator": SLEEPS}
    roles["broker" if moment == "start-up" else "learner"] = kill + SLEEPS
    began = time.monotonic()
    with pytest.raises(Stopped) as stopped:
        supervise(config_of(tmp_path), tmp_path, roles)
    assert stopped.value.exit_code == code
    assert time.monotonic() - began < 10.0
    assert roles_left() == []


def test_c59_a_killed_launcher_leaves_nobody(tmp_path: Path) -> None:
    up = [sys.executable, "-m", "launch.cli", "up", f"output_dir={tmp_path}", "telemetry.live=false"]
    process = subprocess.Popen(up, env={**os.environ, "OMP_NUM_THREADS": "1"})
    family: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + 30.0
    while len(family) < 4:  # broker, learner, two generators: as early in their lives as can be seen
        assert time.monotonic() < deadline
        assert process.poll() is None
        family.update({child.pid: child for child in psutil.Process(process.pid).children(recursive=True)})
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(list(family.values()), timeout=10.0)
    assert alive == []
