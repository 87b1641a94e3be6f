"""``slipstream broker`` as a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.config import BrokerConfig
from broker.connect import connect

COMMAND = [sys.executable, "-P", "-m", "launch.cli", "broker"]


def started(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    """A broker that has said that it is ready."""
    process = subprocess.Popen(
        [*COMMAND, f"output_dir={tmp_path}", *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("broker ready: ")
    return process


def url_of(tmp_path: Path, experiment: str = "quickstart") -> str:
    return (tmp_path / "slipstream" / experiment / "broker.url").read_text().strip()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_c111_a_signal_ends_it_and_frees_the_port(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    process = started(tmp_path)
    url = url_of(tmp_path)
    process.send_signal(signum)
    assert process.wait(timeout=10.0) == code
    again = started(tmp_path, f"broker.port={url.rpartition(':')[2]}")
    assert url_of(tmp_path) == url
    again.terminate()
    again.wait(timeout=10.0)
    assert not (tmp_path / "slipstream" / "quickstart" / "broker.url").exists()


@pytest.mark.slow
def test_c113_eight_brokers_at_once_get_a_port_each(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([*COMMAND, f"output_dir={tmp_path}", f"experiment=b{i}"], stdout=subprocess.PIPE)
        for i in range(8)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"broker ready: ")
        urls = {url_of(tmp_path, f"b{i}") for i in range(8)}
        assert len(urls) == 8
        for url in urls:
            client = connect(BrokerConfig(reconnect_timeout_s=10.0), url)
            assert client.state().counts.balanced()
            client.close()
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(timeout=10.0) for process in processes] == [143] * 8


def test_c113_a_busy_port_is_named_with_its_setting(tmp_path: Path) -> None:
    process = started(tmp_path)
    port = url_of(tmp_path).rpartition(":")[2]
    second = subprocess.run(
        [*COMMAND, f"output_dir={tmp_path}", "experiment=second", f"broker.port={port}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    process.terminate()
    process.wait(timeout=10.0)
    assert second.returncode == 1
    assert "broker.port" in second.stderr
    assert "Traceback" not in second.stderr


def test_the_ledger_of_a_running_broker_is_shown_without_naming_its_url(tmp_path: Path) -> None:
    process = started(tmp_path)
    command = [sys.executable, "-P", "-m", "launch.cli", "ledger", f"output_dir={tmp_path}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    process.terminate()
    process.wait(timeout=10.0)
    assert shown.returncode == 0, shown.stderr
    assert "balanced: every one of 0 prompts is in exactly one state" in shown.stdout
    assert "queued" in shown.stdout


def refused(tmp_path: Path, *overrides: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, f"output_dir={tmp_path}", *overrides],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **env},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_second_broker_of_a_run_is_refused_and_leaves_the_first_ones_url(tmp_path: Path) -> None:
    process = started(tmp_path)
    url = url_of(tmp_path)
    code, told = refused(tmp_path)
    assert (code, "the broker of this run is running in" in told) == (2, True)
    code, told = refused(tmp_path, f"broker.port={url.rpartition(':')[2]}")
    assert code == 2
    assert url_of(tmp_path) == url
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10.0)
    again = started(tmp_path)  # the claim ended with it
    again.terminate()
    again.wait(timeout=10.0)


def test_a_broker_takes_away_its_own_url_alone(tmp_path: Path) -> None:
    process = started(tmp_path)
    written = tmp_path / "slipstream" / "quickstart" / "broker.url"
    written.write_text("tcp://10.0.0.1:1\n")
    process.terminate()
    assert process.wait(timeout=10.0) == 143
    assert written.read_text() == "tcp://10.0.0.1:1\n"


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "redis://:hunter2@127.0.0.1:1/0"])
def test_a_broker_that_is_told_of_another_one_does_not_start(url: str, tmp_path: Path) -> None:
    for code, told in (refused(tmp_path, f"broker.url={url}"), refused(tmp_path, SLIPSTREAM_BROKER_URL=url)):
        assert code == 2
        assert "broker.url names an existing broker; `slipstream broker` starts one: unset it" in told
        assert "hunter2" not in told


@pytest.mark.service
def test_c122_the_redis_server_has_a_password_that_nobody_sees(tmp_path: Path) -> None:
    process = started(tmp_path, "broker.backend=redis")
    url_file = tmp_path / "slipstream" / "quickstart" / "broker.url"
    password = url_file.read_text().partition("redis://")[2].rpartition("@")[0].rpartition(":")[2]
    assert len(password) >= 16
    assert url_file.stat().st_mode & 0o077 == 0
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) > 1  # a real server
    for each in family:
        assert password not in " ".join(each.cmdline())
    client = connect(BrokerConfig(backend="redis", namespace="n"), url_file.read_text().strip())
    assert client.state().counts.balanced()
    client.close()
    process.terminate()
    output, errors = process.communicate(timeout=10.0)
    assert password not in output + errors
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert alive == []


@pytest.mark.service
def test_c59_a_killed_broker_leaves_no_redis_server(tmp_path: Path) -> None:
    process = started(tmp_path, "broker.backend=redis")
    servers = psutil.Process(process.pid).children(recursive=True)
    assert servers
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10.0)
    _, alive = psutil.wait_procs(servers, timeout=10.0)
    assert alive == []
