"""The command line."""

import errno
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from configs.load import load
from launch import cli
from launch.run_folder import explain


def slipstream(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "launch.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def test_c102_a_wrong_key_exits_with_2_and_names_the_nearest_without_a_traceback(tmp_path: Path) -> None:
    for command in ("up", "broker", "learner", "generator", "ledger"):
        done = slipstream(command, "learner.optim.lrr=1", cwd=tmp_path)
        assert done.returncode == 2, command
        assert "learner.optim.lrr=1: unknown key; did you mean learner.optim.lr?" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize("arguments", [[], ["fly"], ["up", "--fast"], ["up", "-c", "nowhere"], ["up", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[str], tmp_path: Path) -> None:
    done = slipstream(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_generator_without_a_broker_is_told_how_to_name_one(tmp_path: Path) -> None:
    done = slipstream("generator", f"output_dir={tmp_path}")
    assert done.returncode == 2
    assert "broker.url=tcp://HOST:PORT" in done.stderr
    assert "SLIPSTREAM_BROKER_URL" in done.stderr


def refuses_folder(folder: str, *command: str) -> None:
    done = slipstream(*command, f"output_dir={folder}")
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"output_dir={folder}: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "/sys", "file", "file/x", "x" * 5000])
def test_an_output_folder_that_cannot_be_is_named_with_the_reason(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refuses_folder(place if place.startswith("/") else f"{tmp_path}/{place}", "up")


def test_a_broker_names_an_output_folder_that_cannot_be() -> None:
    refuses_folder("/proc/x", "broker")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["up", "launch.mode=serial", "generator.engine=transformers"], ["learner"], ["generator"]]
)
def test_every_role_names_an_output_folder_that_cannot_be(command: list[str]) -> None:
    refuses_folder("/proc/x", *command, "learner.ranks=1", "broker.url=tcp://127.0.0.1:9")


def test_what_is_wrong_inside_a_folder_that_is_there_stays_a_traceback(tmp_path: Path) -> None:
    config = load("quickstart", [f"output_dir={tmp_path}"])
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    missing = FileNotFoundError(errno.ENOENT, "", str(run_dir / "checkpoints" / "x"))
    elsewhere = PermissionError(errno.EACCES, "", "/somewhere/else")
    assert explain(missing, config) is explain(elsewhere, config) is explain(OSError(errno.EPIPE, ""), config) is None
    refused = explain(PermissionError(errno.EACCES, "", str(run_dir / "logs")), config)
    assert refused == (2, f"output_dir={tmp_path}: Permission denied: {run_dir / 'logs'}")


class RustError(Exception):
    """As safetensors raises it."""


@pytest.mark.parametrize(
    "full", [OSError(errno.ENOSPC, ""), OSError(errno.EDQUOT, "", "x"), RustError("No space left (os error 28)")]
)
def test_a_full_disk_is_named_and_exits_with_1(
    full: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise full

    monkeypatch.setattr("launch.config_show.run", run)
    assert cli.main(["config", "show", f"output_dir={tmp_path}"]) == 1
    assert f"slipstream: output_dir={tmp_path}: " in capsys.readouterr().err


INTERRUPTED = """
import importlib.abc, os, signal, sys
from launch.cli import main

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
for name in [name for name in sys.modules if name == sys.argv[1]]:
    del sys.modules[name]
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", ["argparse", "broker.errors", "configs.load", "pydantic", "launch.config_show"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, "config", "show"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{INTERRUPTED}"
    command = [sys.executable, "-c", script, "configs.load", "config", "show"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_in_a_command_lets_it_close_what_it_has_opened() -> None:
    script = """
import os, signal, sys
import launch.config_show
from launch.cli import main

def run(args):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("closed", flush=True)

launch.config_show.run = run
sys.exit(main(["config", "show"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "closed\n", "")


def test_the_version_is_the_packages() -> None:
    done = slipstream("--version")
    assert (done.returncode, done.stdout) == (0, f"slipstream {version('slipstream')}\n")


def test_config_show_prints_what_would_run_and_the_derived_numbers() -> None:
    settings = ["rollout.groups_per_step=4", "-c", "quickstart", "rollout.completions_per_group=8"]
    done = slipstream("config", "show", *settings, "learner.optim.lr=2e-5")
    assert done.returncode == 0
    assert "# samples a step: 32 = 4 groups x 8 completions" in done.stdout
    assert "lr: 2e-05" in done.stdout


def test_help_and_wrong_settings_cost_no_heavy_import() -> None:
    script = (
        "import sys; from launch import cli\n"
        "code = cli.main(['up', 'learner.optim.lrr=1'])\n"
        "heavy = {'torch', 'vllm', 'transformers', 'deepspeed', 'ray', 'matplotlib'} & set(sys.modules)\n"
        "print(code, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 []\n"


def test_overrides_may_stand_on_both_sides_of_an_option() -> None:
    args = cli.arguments(["up", "a=1", "-c", "x", "b=2"])
    assert (args.config, args.overrides) == ("x", ["a=1", "b=2"])


def test_what_config_lacks_is_named_and_settings_are_not_among_it() -> None:
    done = slipstream("config")
    assert done.returncode == 2
    assert "the following arguments are required: action" in done.stderr
    assert "KEY=VALUE" not in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["config", "--help"]])
def test_help_names_the_presets_and_which_of_them_is_meant_without_one(arguments: list[str]) -> None:
    done = slipstream(*arguments)
    text = " ".join(done.stdout.split())
    assert "default: quickstart; presets: quickstart, smollm2_gsm8k_cpu" in text


def test_settings_of_one_call_are_not_those_of_the_next() -> None:
    assert cli.arguments(["up", "a=1", "-c", "x", "b=2"]).overrides == ["a=1", "b=2"]
    assert cli.arguments(["up"]).overrides == []


def test_every_line_about_several_wrong_settings_says_who_speaks(tmp_path: Path) -> None:
    done = slipstream("up", "seed=x", "learner.optim.lrr=1", "rollout.top_p=7", cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert len(lines) == 3
    assert all(line.startswith("slipstream: ") for line in lines)


def test_a_thread_that_still_waits_inside_pytorch_does_not_abort_the_process_at_its_end() -> None:
    """Where the interpreter is taken down under it, one in a few ends with SIGABRT, so several are tried."""
    script = (
        "import atexit, datetime, sys, threading, time\n"
        "from torch.distributed import TCPStore\n"
        "from launch import cli\n"
        "def wait(store):\n"
        "    while True:\n"
        "        try: store.get('never')\n"
        "        except Exception: pass\n"
        "def main():\n"
        "    for _ in range(8):\n"
        "        store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "        store.set_timeout(datetime.timedelta(seconds=0.02))\n"
        "        threading.Thread(target=wait, args=(store,), daemon=True).start()\n"
        "    atexit.register(print, 'at the end')\n"
        "    time.sleep(0.2)\n"
        "    print('main is done')\n"
        "    return 3\n"
        "cli.main = main\n"
        "cli.command()\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3, done.stderr[-2000:]
        assert done.stdout.splitlines() == ["main is done", "at the end"]
