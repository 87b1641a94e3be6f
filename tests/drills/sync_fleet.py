"""The processes of the weight sync's drill, the learner, and the waits of its driver, each with its deadline."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from tests.drills.processes import Process
from tests.drills.setting import SILENCE_S, Setting
from tests.drills.sync_audit import Audit
from tests.drills.sync_generator import Forks, Generator
from tests.drills.sync_learner import STEP_S, Learner
from tests.drills.sync_tap import Tap

TURN_S = 0.02


class Stuck(Exception):
    """Something did not come about in time, or a process ended by itself; says where everyone stands."""


class Heard(logging.Handler):
    """What the product has logged in this process, with the time it did; also in ``learner.log``."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self.said: list[tuple[float, str]] = []
        self._file = file.open("a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """From any thread."""
        self.said.append((time.monotonic(), record.getMessage()))
        print(f"{record.relativeCreated:6.0f} {record.levelname} {record.getMessage()}", file=self._file, flush=True)

    def since(self, moment: float, part: str) -> list[str]:
        """Lines with ``part`` in them."""
        return [text for at, text in list(self.said) if at >= moment and part in text]


class Fleet:
    """Broker process, learner and audit from the beginning; generators come and go. ``close`` ends everything."""

    def __init__(self, setting: Setting, *, step_s: float = STEP_S) -> None:
        self.setting, self.directory, self._step_s = setting, Path(setting.directory), step_s
        self.heard = Heard(self.directory / "learner.log")
        logging.getLogger().addHandler(self.heard)
        logging.getLogger().setLevel(logging.INFO)
        self.tap = Tap()
        self.names: dict[int, str] = {}  # of every generator process there ever was
        self.alive: list[Generator] = []
        self.may_give_up = False  # the learner, for want of generators
        self._numbers = itertools.count()
        self._forks = Forks(self.directory)
        self.broker = Process("broker", "broker_process", self.directory)
        self.learner: Learner | None = None
        self.audit: Audit | None = None

    def open(self) -> None:
        """Starts all but generators."""
        self.tap.open()
        self.broker.start()
        self.wait(self.setting.url_file.exists, SILENCE_S, "the broker did not start")
        self.learner = Learner(self.setting, step_s=self._step_s)
        self.audit = Audit(self.setting, self.learner)
        self.audit.start()
        self.learner.start()

    def close(self) -> None:
        """Everything ends, whatever state it is in."""
        for one in self.alive:
            one.stop()
        self._forks.close()
        self.broker.stop()
        self.tap.close()
        if self.audit is not None:
            self.audit.close()
        if self.learner is not None:
            self.learner.close()
        logging.getLogger().removeHandler(self.heard)

    def spawn(self, name: str = "") -> Generator:
        """A new generator, under a new name unless one is given. From the main thread."""
        name = name or f"generator-{next(self._numbers)}"
        one = self._forks.start(name)
        self.alive.append(one)
        self.names[one.pid] = name
        return one

    def bury(self, one: Generator) -> None:
        """Reaps a generator that was killed."""
        one.stop()
        self.alive.remove(one)

    def dismiss(self, one: Generator, limit_s: float) -> None:
        """Tells a generator to leave. Raises Stuck unless it has ended by itself within ``limit_s``."""
        self.alive.remove(one)
        if not one.leave(limit_s):
            raise Stuck(f"{one.name} was told to leave, and has not, or not well\n{one.standing()}")

    def there(self, one: Generator) -> bool:
        """Whether it is a member still: not given up, whatever it is shown as."""
        assert self.audit is not None
        return self.audit.member(one.pid) is not None

    def uses(self, one: Generator, version: int) -> bool:
        """Whether it reports ``version`` or a later one in use."""
        assert self.audit is not None
        return self.audit.holds(one.pid, version)

    def serves(self, one: Generator, version: int) -> bool:
        """Whether it uses such a version, and the learner has trained on tokens that it sampled under one."""
        assert self.learner is not None
        return self.uses(one, version) and max(self.learner.sampled.get(one.name, {-1}), default=-1) >= version

    def wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> float:
        """Returns the seconds until ``condition`` held. Raises Stuck after ``limit_s``, or when something is wrong."""
        began = time.monotonic()
        while not condition():
            self._look()
            if time.monotonic() - began > limit_s:
                raise Stuck(f"{what}, for {limit_s:g} s\n{self.standing()}")
            time.sleep(TURN_S)
        return time.monotonic() - began

    def rest(self, seconds: float) -> None:
        """Lets time go by, with an eye on everyone."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            time.sleep(TURN_S)

    def _look(self) -> None:
        if text := next(filter(None, [self.broker.crashed(), *(one.crashed() for one in self.alive)]), ""):
            raise Stuck(f"ended by itself: {text}")
        for part in (self.learner, self.audit):
            if part is not None and part.wrong:
                raise Stuck(part.wrong[0])
        ended = self.learner is not None and self.learner.failure is not None
        if self.learner is not None and ended and not (self.may_give_up and self.learner.gave_up):
            raise Stuck(f"the learner has ended: {self.learner.failure!r}\n{self.standing()}")

    def standing(self) -> str:
        """Where everyone stands."""
        learner = self.learner
        lines = [f"learner: version {learner.version}, {learner.failure!r}" if learner else "no learner"]
        if self.audit is not None:
            lines += [f"{one.name}, pid {one.pid}: {self.audit.member(one.pid)}" for one in self.alive]
        lines += [f"learner: {text}" for _, text in self.heard.said[-15:]]
        return "\n".join([*lines, *(one.standing() for one in self.alive)])
