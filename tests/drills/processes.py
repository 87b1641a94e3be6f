"""The processes under drill, as their driver sees them: started, killed with SIGKILL, started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.drills.setting import ROOT, UP


class Process:
    """One role that dies and comes back. All of its lives write to one log.

    ``wanted_at``: when to start it again, on the monotonic clock; None while it runs, or when it has done its work.
    """

    def __init__(self, name: str, module: str, directory: Path, *arguments: str) -> None:
        self.name, self.role = name, module.removesuffix("_process")
        self.log = directory / f"{name}.log"
        self._command = [sys.executable, "-m", f"tests.drills.{module}", str(directory), *arguments]
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0
        self.wanted_at: float | None = 0.0
        self.starts = self.kills = 0
        self.done = False

    def start(self) -> None:
        """From the main thread: the child dies with the thread that started it."""
        with self.log.open("ab") as file:
            self._log_from = file.tell()
            self._process = subprocess.Popen(
                [*self._command, str(self.starts)],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.starts += 1
        self.wanted_at = None

    def up(self) -> bool:
        """Whether this life runs and is past the interpreter's start."""
        return self.running() and self._said().startswith(UP)

    def running(self) -> bool:
        """Whether this life has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self, again_after_s: float) -> None:
        """SIGKILL; to be started again after a while."""
        self.stop()
        self.kills += 1
        self.wanted_at = time.monotonic() + again_after_s

    def stop(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def crashed(self) -> str:
        """What this life said last, if it ended by itself and not well; a good end sets ``done``."""
        if self.done or self.wanted_at is not None or self._process is None or self._process.poll() is None:
            return ""
        if self._process.returncode == 0:
            self.done = True
            return ""
        return f"{self.name}, start {self.starts}, ended with {self._process.returncode}: {tail(self._said(), 25)}"

    def standing(self) -> str:
        """For the error of a drill that does not move."""
        how = "done" if self.done else "running" if self.running() else "down"
        said = tail(self.log.read_text(errors="replace") if self.log.exists() else "", 12)
        return f"--- {self.name}: {how}, {self.starts} starts, {self.kills} kills; its log ends with\n{said}"

    def _said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")


def tail(text: str, lines: int) -> str:
    """Its last lines."""
    return "\n".join(text.splitlines()[-lines:])
