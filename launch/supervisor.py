"""Runs a learner, its broker and its generators as processes of this machine until the learner has finished.

    broker --url--> learner, gen0, gen1, ...     each started with the command a person would type

A generator that dies is started again, a few times, and so is our broker, at its old address: what it does not have on
disk (broker.durability) the learner tells it anew. Whatever else fails first ends the run with its own error.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from broker.errors import SlipstreamError
from configs.run import RunConfig
from launch import environment
from launch.children import Child, Children
from launch.step_lines import SHOWN
from telemetry.plain import plain

_BROKER_START_S = 30.0
_RESTARTS = 3  # of one role
_RESTARTS_WITHIN_S = 600.0
_USAGE = 2
_BACKSTOP = 1.5  # the learner has the same watchdog and knows more, so it is given the first word
_TAIL_BYTES = 4000
_ERROR_BYTES = 1 << 16  # an engine's own tracebacks are long


class RoleFailed(SlipstreamError):
    """A role of the run ended with an error, and with it the run."""

    def __init__(self, child: Child, why: str = "") -> None:
        reason = why or f"ended with exit code {child.exit_code}"
        super().__init__(f"{child.name} {reason}\n{tail(child.log)}\n(whole log: {child.log})")
        self.exit_code = 1 if child.process.returncode is None else child.exit_code or 1


class NoProgress(SlipstreamError):
    """Nothing has moved for ``launch.watchdog_s``."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """How the supervisor knows that the run moves: when it last did, and what stands in its way."""

    last_progress: Callable[[], float]
    obstacle: Callable[[], str]


def command(role: str, config: Path, *arguments: str) -> list[str]:
    """The command line of one role. ``-P``: the current directory holds folders, not packages."""
    return [sys.executable, "-P", "-m", "launch.cli", role, "-c", str(config), *arguments]


class Supervisor:
    """Starts and watches the roles; everything it starts lives in ``children``, which stops it."""

    def __init__(
        self,
        config: RunConfig,
        config_file: Path,
        children: Children,
        *,
        command: Callable[..., Sequence[str]] = command,
    ) -> None:
        self._config = config
        self._config_file = config_file
        self._logs = config_file.parent / "logs"
        self._children = children
        self._command = command
        self._deaths: dict[str, deque[float]] = {}
        self._due: dict[str, float] = {}
        self._lives: dict[str, int] = {}  # bytes that a role's log held when its present life began
        self._url = ""

    def start_broker(self) -> str:
        """Starts the broker, unless the configuration names one, and returns its url (which may hold a password)."""
        self._url = self._config.broker.url
        if self._url:
            return self._url
        reader, writer = os.pipe()
        try:
            env = _without_url(environment.child(**{environment.READY_FD: str(writer)}))
            child = self._start("broker", "broker", env=env, pass_fds=(writer,))
            os.close(writer)
            writer = -1
            self._url = self._read_url(child, reader)
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        return self._url

    def start_roles(self) -> None:
        """Starts the learner and the generators."""
        self._start_with_url("learner")
        for index in range(self._config.generator.count):
            self._start_with_url(f"gen{index}")

    def watch(self, heartbeat: Heartbeat) -> None:
        """Returns when the learner has finished. Raises RoleFailed, NoProgress, or Stopped after a signal."""
        while True:
            ended = self._children.wait(self._patience(heartbeat))
            if ended is None:
                self._restart_due()
                self._check_progress(heartbeat)
            elif ended.name == "learner" and ended.exit_code == 0:
                return
            elif ended.name.startswith("gen") and ended.exit_code == 0:
                continue  # the run has ended for it; the learner will say so
            elif ended.name.startswith("gen") or (ended.name == "broker" and self._keeps_its_address()):
                self._restart_later(ended)
            else:
                raise RoleFailed(ended)

    def _keeps_its_address(self) -> bool:
        """Whether a broker started again has the url of the one that died (a Redis without a folder: new password)."""
        return self._url.startswith("tcp:") or self._config.broker.durability == "disk"

    def _start(self, name: str, role: str, *arguments: str, env: dict[str, str], pass_fds: Sequence[int] = ()) -> Child:
        log = self._logs / f"{name}.log"
        self._lives[name] = log.stat().st_size if log.is_file() else 0
        return self._children.start(
            name, self._command(role, self._config_file, *arguments), env=env, log=log, pass_fds=pass_fds
        )

    def _start_with_url(self, name: str) -> None:
        env = environment.child(**{environment.BROKER_URL: self._url, SHOWN: "1"})
        if name == "learner":
            self._start(name, "learner", env=env)
        elif name == "broker":
            self._start(name, "broker", f"broker.port={urlsplit(self._url).port}", env=_without_url(env))
        else:
            self._start(name, "generator", "--id", name, env=env)

    def _read_url(self, child: Child, reader: int) -> str:
        deadline, told = time.monotonic() + _BROKER_START_S, b""
        while not told.endswith(b"\n"):
            ended = self._children.wait(deadline - time.monotonic(), until=reader)
            if ended is not None:
                raise RoleFailed(ended)
            if time.monotonic() >= deadline:
                raise RoleFailed(child, f"was not ready within {_BROKER_START_S:.0f} s")
            told += self._read_some(child, reader)
        return told.decode().strip()

    def _read_some(self, child: Child, reader: int) -> bytes:
        os.set_blocking(reader, False)
        try:
            data = os.read(reader, 4096)
        except BlockingIOError:
            return b""
        if not data:  # every writer is gone, and so is the broker, or as good as
            ended = self._children.wait(self._config.launch.stop_timeout_s)
            raise RoleFailed(ended or child, "" if ended else "closed its ready pipe without a word")
        return data

    def _restart_later(self, child: Child) -> None:
        now, deaths = time.monotonic(), self._deaths.setdefault(child.name, deque(maxlen=_RESTARTS + 1))
        deaths.append(now)
        recent = sum(now - death < _RESTARTS_WITHIN_S for death in deaths)
        if child.exit_code == _USAGE or recent > _RESTARTS:
            raise RoleFailed(child)
        self._due[child.name] = now + 0.5 * 2.0 ** (recent - 1)
        print(
            f"{child.name} ended with exit code {child.exit_code}; restart {recent} of {_RESTARTS}; "
            f"last error in {child.log}: {last_error(child.log, self._lives[child.name]) or 'none'}",
            file=sys.stderr,
        )

    def _restart_due(self) -> None:
        for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
            del self._due[name]
            self._start_with_url(name)

    def _patience(self, heartbeat: Heartbeat) -> float:
        stalled = heartbeat.last_progress() + _BACKSTOP * self._config.launch.watchdog_s
        return min([stalled, *self._due.values()]) - time.monotonic()

    def _check_progress(self, heartbeat: Heartbeat) -> None:
        still = time.monotonic() - heartbeat.last_progress()
        if still >= _BACKSTOP * self._config.launch.watchdog_s:
            raise NoProgress(
                f"no progress for {still:.0f} s (launch.watchdog_s = {self._config.launch.watchdog_s:g}): "
                f"{heartbeat.obstacle()}\n(logs: {self._logs})"
            )


def _without_url(env: dict[str, str]) -> dict[str, str]:
    """For our broker, which would take a url for that of another one."""
    return {name: value for name, value in env.items() if name != environment.BROKER_URL}


def tail(log: Path | None) -> str:
    """The end of a log."""
    return "\n".join("  | " + line for line in _end(log, 0, _TAIL_BYTES)[-25:])


def last_error(log: Path | None, start: int = 0) -> str:
    """What a process that has just ended says it died of, from byte ``start`` of its log on.

    The error of its last traceback, else the last line that was logged as an error, else its last words.
    """
    lines = [line for line in _end(log, start, _ERROR_BYTES) if line.strip()]
    traces = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [line for line in lines[traces[-1] + 1 :] if not line[0].isspace()] if traces else []
    told = [line for line in lines if line.startswith("slipstream: ") or " ERROR " in line]
    return (errors[:1] or told[-1:] or lines[-1:] or [""])[0]


def _end(log: Path | None, start: int, most: int) -> list[str]:
    """The lines from byte ``start`` on, of the last ``most`` bytes, to be shown on a terminal."""
    if log is None or not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - most))
        return [plain(line) for line in file.read().decode("utf-8", errors="replace").splitlines()]
