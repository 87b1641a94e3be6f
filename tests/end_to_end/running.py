"""One real run under test: its processes, its output, its metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
SMALL = (
    "telemetry.live=false",
    "rollout.groups_per_step=8",
    "rollout.completions_per_group=8",
    "learner.eval.at_start=false",
    "learner.eval.at_end=false",
)


class Running:
    """One `slipstream` process and everything below it."""

    def __init__(self, arguments: list[str], output: Path, env: dict[str, str] | None = None) -> None:
        self.output = output
        self._file = output.open("w")
        self.process = subprocess.Popen(
            arguments, stdout=self._file, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        self._tree: dict[int, psutil.Process] = {}

    def tree(self) -> list[psutil.Process]:
        """Every process of the run seen so far that is still alive."""
        try:
            found = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._tree |= {one.pid: one for one in found}
        return [one for one in self._tree.values() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits for ``condition`` while the run lives; a run that ends before is a failure with its output."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.tree()
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s\n{self.text()[-3000:]}"
            try:
                code = self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            assert condition(), f"{what}: the run ended before, with {code}\n{self.text()[-3000:]}"

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.tree()
            try:
                return self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, f"still running after {timeout_s} s\n{self.text()[-3000:]}"

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(errors="replace")

    def kill(self) -> None:
        """Leaves nothing behind, whatever the test did."""
        for one in self.tree():
            one.kill()
        self.process.kill()
        self.process.wait()
        self._file.close()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The steps so far."""
    file = run_dir / "logs" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def child(run: Running, name: str) -> psutil.Process:
    """The process of the run whose command line has ``name`` in it."""
    return next(one for one in run.tree() if name in one.cmdline())


def stop_signal(run: Running, number: signal.Signals) -> float:
    """Sends a signal to the launcher alone and returns the seconds until all of the run is gone."""
    run.tree()
    began = time.monotonic()
    run.process.send_signal(number)
    run.wait(15.0)
    while run.tree():
        assert time.monotonic() - began < 15.0, [one.cmdline() for one in run.tree()]
        psutil.wait_procs(run.tree(), timeout=0.2)
    return time.monotonic() - began
