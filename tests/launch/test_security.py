"""Secrets and strangers, with the real roles."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from broker.config import BrokerConfig
from broker.connect import connect
from broker.errors import BrokerError
from configs.load import load
from launch import environment
from launch.run_folder import keep_config

SLIPSTREAM = [sys.executable, "-P", "-m", "launch.cli"]


class CommandLines(threading.Thread):
    """Collects the command lines of everything below this process, again and again, also of what lives briefly."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[str] = set()
        self._end = threading.Event()

    def __enter__(self) -> "CommandLines":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self.join(10.0)

    def run(self) -> None:
        while not self._end.wait(0.02):
            for each in psutil.Process().children(recursive=True):
                try:
                    self.seen.add(Path(f"/proc/{each.pid}/cmdline").read_bytes().decode(errors="replace"))
                except OSError:
                    continue


def slipstream(command: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLIPSTREAM, command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


@pytest.fixture
def broker_process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    with (tmp_path / "broker.err").open("w") as errors:
        process = subprocess.Popen(
            [*SLIPSTREAM, "broker", f"output_dir={tmp_path}", "telemetry.log_level=debug", *request.param],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    yield process
    process.kill()
    process.wait(10.0)


def secrets_of(run_dir: Path) -> list[str]:
    """Every password and every secret key of the run."""
    url = (run_dir / "broker.url").read_text().strip()
    found = [url.partition("//:")[2].rpartition("@")[0]] if url.startswith("redis") else []
    for file in run_dir.glob("broker*.key"):
        found += re.findall(r"secret (\S+)", file.read_text())
    return found


@pytest.mark.service
@pytest.mark.parametrize(
    ("broker_process", "secrets"),
    [(["broker.backend=redis"], 1), (["broker.security=curve"], 3), (["broker.host=0.0.0.0"], 3)],
    indirect=["broker_process"],
)
def test_c122_no_secret_is_in_any_argument_log_or_file_that_people_share(
    broker_process: subprocess.Popen[str], secrets: int, tmp_path: Path
) -> None:
    run_dir = tmp_path / "slipstream" / "quickstart"
    with CommandLines() as lines:
        assert broker_process.stdout is not None
        told = broker_process.stdout.readline()
        assert told.startswith("broker ready: ")
        settings = [f"output_dir={tmp_path}", "telemetry.log_level=debug"]
        mode = ["broker.security=curve"] if secrets == 3 else []
        asked = slipstream("ledger", *settings, *mode)
        assert asked.returncode == 0, asked.stderr
        assert "balanced" in asked.stdout
        shown = slipstream("config", "show", *settings, f"broker.url={(run_dir / 'broker.url').read_text().strip()}")
        keep_config(load("quickstart", [*settings, *mode]))
        # A stranger, whose error must not say what it tried.
        wrong = slipstream("ledger", *settings, SLIPSTREAM_BROKER_URL="redis://:hunter2@127.0.0.1:1/0")
        assert wrong.returncode == 1
        secret_words = secrets_of(run_dir)  # before the end, which takes them away
        broker_process.send_signal(signal.SIGTERM)
        told += broker_process.communicate(timeout=10.0)[0]
    assert len(secret_words) == secrets and all(len(word) > 16 for word in secret_words)
    shared = [told, asked.stdout, asked.stderr, shown.stderr, shown.stdout, wrong.stdout, wrong.stderr]
    shared += [(tmp_path / "broker.err").read_text(), (run_dir / "config.yaml").read_text()]
    # config show was given the url in its arguments by this test itself: those are not the product's.
    arguments = [line for line in lines.seen if "broker.url=" not in line]
    assert any("launch.cli\0broker" in line for line in arguments)
    assert secrets != 1 or any("redis-server" in line for line in arguments)
    for text in [*shared, *arguments]:
        for word in [*secret_words, "hunter2"]:
            assert word not in text


@pytest.mark.parametrize("broker_process", [["broker.host=0.0.0.0"]], indirect=True)
def test_another_host_gets_in_with_a_copy_of_the_key_and_not_without(
    broker_process: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert broker_process.stdout is not None
    told = broker_process.stdout.readline()
    run_dir = tmp_path / "slipstream" / "quickstart"
    assert f"key for clients: {run_dir / 'broker.key'}" in told
    url = (run_dir / "broker.url").read_text().strip()
    copy = tmp_path / "copied.key"
    copy.write_bytes((run_dir / "broker.key").read_bytes())
    copy.chmod(0o600)
    elsewhere = [f"output_dir={tmp_path / 'elsewhere'}", f"broker.url={url}", "broker.security=curve"]
    done = slipstream("ledger", *elsewhere, f"broker.key_file={copy}")
    assert done.returncode == 0, done.stderr
    done = slipstream("ledger", *elsewhere)
    assert done.returncode == 1
    assert "broker.key_file" in done.stderr and "Traceback" not in done.stderr
    # A killed broker has the same keys when it is back at its address.
    client = connect(BrokerConfig(security="curve", key_file=str(copy)), url)
    assert client.state().counts.fed == 0
    broker_process.kill()
    broker_process.wait(10.0)
    again = subprocess.Popen(
        [
            *SLIPSTREAM,
            "broker",
            f"output_dir={tmp_path}",
            "broker.host=0.0.0.0",
            f"broker.port={url.rpartition(':')[2]}",
        ]
    )
    assert client.state().counts.fed == 0
    client.close()
    again.terminate()
    again.wait(10.0)


def test_what_the_broker_may_not_do_exits_with_2(tmp_path: Path) -> None:
    for settings, part in (
        (["broker.host="], 'broker.host="": expected a host name'),
        (["broker.host=0.0.0.0", "broker.security=none"], "set broker.security = curve"),
        (["broker.host='::'", "broker.security=none"], "set broker.security = curve"),
        (["broker.security=tls"], "broker.security"),
    ):
        done = slipstream("broker", f"output_dir={tmp_path}", *settings)
        assert (done.returncode, part in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "url", ["foo", "http://h:1", "tcp://x", "tcp://[::1", "tcp://h:1/x", "localhost:5977", "redis://:hunter2@h/x"]
)
def test_a_url_of_no_broker_exits_with_2_from_wherever_it_comes(url: str, tmp_path: Path) -> None:
    began = time.monotonic()
    for done in (
        slipstream("ledger", f"output_dir={tmp_path}", f"broker.url={url}"),
        slipstream("ledger", f"output_dir={tmp_path}", SLIPSTREAM_BROKER_URL=url),
    ):
        assert done.returncode == 2
        assert "accepted are tcp://HOST:PORT" in done.stderr
        assert "broker.url=" in done.stderr or "SLIPSTREAM_BROKER_URL=" in done.stderr
        assert "Traceback" not in done.stderr and "hunter2" not in done.stderr
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:9", "redis://:hunter2@127.0.0.1:9/0", "unix:///nowhere.sock"])
def test_who_asks_a_broker_that_is_not_there_hears_soon_and_does_not_wait_long(url: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done = slipstream("ledger", f"output_dir={tmp_path}", SLIPSTREAM_BROKER_URL=url)
    assert time.monotonic() - began < 20.0
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    shown = url.replace(":hunter2@", "")
    assert first.startswith(f"waiting for the broker at {shown}, up to broker.reconnect_timeout_s = 5")
    assert f"the broker at {shown} has been silent for broker.reconnect_timeout_s = 5" in last
    done = slipstream("ledger", f"output_dir={tmp_path}", f"broker.url={url}", "broker.reconnect_timeout_s=0.5")
    assert "broker.reconnect_timeout_s = 0.5" in done.stderr


def test_the_keys_of_a_run_are_in_its_folder_unless_they_have_a_place() -> None:
    assert environment.placed(load("quickstart")).key_file == "outputs/slipstream/quickstart/broker.key"
    assert environment.placed(load("quickstart", ["broker.key_file=/k"])).key_file == "/k"


def test_a_key_file_of_the_run_folder_is_used_by_itself(tmp_path: Path) -> None:
    config = environment.placed(load("quickstart", [f"output_dir={tmp_path}"]))
    with pytest.raises(BrokerError, match=r"slipstream/quickstart/broker\.key: No such file"):
        connect(config, "tcp://10.0.0.5:1")
