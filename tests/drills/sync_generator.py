"""Generator processes as their driver sees them, forked by a process that has imported torch: they start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.drills.processes import tail
from tests.drills.setting import ROOT

GONE_S = 10.0  # for the kernel to end a killed process
TURN_S = 0.005
LEFT = "left the run"  # last line of a generator that was told to leave


class Forks:
    """The process that forks (tests.drills.sync_generator_process). It dies with the driver, and they all with it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.drills.sync_generator_process", str(directory)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, name: str) -> Generator:
        """A new generator process. Its imports are the first one's to wait for."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        return Generator(name, int(self._process.stdout.readline()), self._directory / f"{name}.log")

    def close(self) -> None:
        """SIGKILL, to it and with it to all that it has forked."""
        self._process.kill()
        self._process.communicate()


class Generator:
    """One process, which lives once."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name, self.pid, self._log = name, pid, log

    def signal(self, signum: signal.Signals) -> None:
        """From any thread."""
        os.kill(self.pid, signum)

    def running(self) -> bool:
        """Whether it has not ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self) -> None:
        """SIGKILL, which a stopped process does not outlive either; returns when it is gone."""
        until = time.monotonic() + GONE_S
        while self.running() and time.monotonic() < until:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(TURN_S)

    def leave(self, limit_s: float) -> bool:
        """SIGTERM; returns whether it has left within ``limit_s``, and well."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + limit_s
        while self.running() and time.monotonic() < until:
            time.sleep(TURN_S)
        said = self._log.read_text(errors="replace").splitlines()
        return not self.running() and said[-1:] == [LEFT]

    def crashed(self) -> str:
        """What it said last, if it has ended; nobody who was killed is asked."""
        return "" if self.running() else f"{self.name} has ended by itself\n{self.standing()}"

    def standing(self) -> str:
        """For the error of a drill that does not move."""
        said = tail(self._log.read_text(errors="replace") if self._log.exists() else "", 12)
        return f"--- {self.name}, process {self.pid}; its log ends with\n{said}"
