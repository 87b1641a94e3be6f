"""A generator process as its driver sees it, forked from a server that has imported torch: it starts at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from broker.lifetime import die_with
from tests.drills import sync_generator_process
from tests.drills.processes import tail
from tests.drills.setting import read, talk

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["__main__", sync_generator_process.__name__])
NICE = 10  # below the learner, which elsewhere has processors of its own


class Generator:
    """One process, which lives once. The fork server dies with the driver, and this with the fork server."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._log = name, directory / f"{name}.log"
        self._process = _FORKS.Process(target=_run, args=(name, str(directory), str(self._log)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def signal(self, signum: signal.Signals) -> None:
        """From any thread; ``stop`` reaps who does not survive it."""
        os.kill(self.pid, signum)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def stop(self) -> None:
        """SIGKILL, which a stopped process does not outlive either."""
        self._process.kill()
        self._process.join(10.0)

    def crashed(self) -> str:
        """What it said last, if it has ended; nobody who is stopped or killed is asked."""
        return "" if self.running() else f"{self.name} ended with {self._process.exitcode}: {self.standing()}"

    def standing(self) -> str:
        """For the error of a drill that does not move."""
        said = tail(self._log.read_text(errors="replace") if self._log.exists() else "", 12)
        return f"--- {self.name}, process {self.pid}; its log ends with\n{said}"


def _run(name: str, directory: str, log: str) -> None:
    """[in the process] Into its log from here on."""
    die_with(os.getppid())
    os.nice(NICE)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    talk()
    sync_generator_process.run(read(directory), name)
