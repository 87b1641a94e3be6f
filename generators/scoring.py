"""Scores answers with the task's reward functions, under a deadline, with failures that never look like a score.

A reward function takes (text, answer, reference) and returns a number, or is a coroutine function that does. Plain
ones run in a thread each, coroutines on the loop; the parts of one answer run side by side.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.errors import SlipstreamError
from broker.messages import Prompt
from tasks.config import TaskConfig
from tasks.loading import described, load_function

RewardFunction = Callable[[str, str, str], Any]

THREADS = 16  # plain reward functions that run at once
MAX_STUCK = 16  # threads past their deadline and still running, which nothing can end but the process


class RewardFailed(SlipstreamError):
    """A reward function raised, ran past its deadline, or gave no finite number: the completion has no reward."""


class RewardsStuck(SlipstreamError):
    """Too many reward calls never came back; the process has to be replaced."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """``reward`` is the sum of ``parts``, each times its weight."""

    reward: float
    parts: dict[str, float]


class Scorer:
    """The reward functions of a task, for one event loop. Raises TaskError for functions not there."""

    def __init__(self, task: TaskConfig, *, timeout_s: float) -> None:
        self._functions = {
            name: load_function(reference, setting=f"task.rewards.{name}") for name, reference in task.rewards.items()
        }
        self._weights = {name: task.weights.get(name, 1.0) for name in task.rewards}
        self._timeout_s = timeout_s
        self._threads = asyncio.Semaphore(THREADS)
        self._stuck = 0

    async def score(self, *, prompt: Prompt, answer: str) -> Score:
        """The reward of one answer. Raises RewardFailed for this answer alone, RewardsStuck for the whole process.

        Waits for each function at most ``generator.reward_timeout_s``, not counting the queue for a thread, which
        moves on because every thread in it has that deadline too.
        """
        return await self.score_text(prompt.text, answer, prompt.reference)

    async def score_text(self, text: str, answer: str, reference: str) -> Score:
        """``score`` for an answer to a prompt that was never fed."""
        calls = [self._part(name, (text, answer, reference)) for name in self._functions]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        parts = dict(zip(self._functions, (r for r in results if isinstance(r, float)), strict=True))
        reward = sum(self._weights[name] * value for name, value in parts.items())
        if not math.isfinite(reward):
            raise RewardFailed(f"the weighted sum of {parts} is not finite")
        return Score(reward=reward, parts=parts)

    async def _part(self, name: str, arguments: tuple[str, str, str]) -> float:
        function = self._functions[name]
        try:
            if inspect.iscoroutinefunction(function):
                async with asyncio.timeout(self._timeout_s):
                    value = await function(*arguments)
            else:
                value = await self._in_thread(function, arguments)
            number = float(value)
        except (RewardFailed, RewardsStuck):
            raise
        except _Raised as error:
            raise RewardFailed(f"reward {name!r}: {error}") from error.__cause__
        except TimeoutError:
            raise RewardFailed(f"reward {name!r}: no result within generator.reward_timeout_s") from None
        except BaseException as error:  # one completion fails and is counted: a reward function may raise anything
            if _called_off() and not isinstance(error, Exception):
                raise  # cancelled, or Ctrl-C in the serial mode: that is for us
            raise RewardFailed(f"reward {name!r}: {described(error, caller=__file__)}") from error
        if not math.isfinite(number):
            raise RewardFailed(f"reward {name!r}: gave {number}")
        return number

    async def _in_thread(self, function: RewardFunction, arguments: tuple[str, str, str]) -> Any:
        """Runs in a daemon thread of its own: one that hangs keeps neither a pool's place nor the process."""
        async with self._threads:
            call = _ThreadCall(function, arguments)
            try:
                async with asyncio.timeout(self._timeout_s):
                    value = await call.result
                    return await value if inspect.isawaitable(value) else value
            except TimeoutError:
                if not call.ended.is_set():
                    self._count_stuck(call)
                raise

    def _count_stuck(self, call: _ThreadCall) -> None:
        self._stuck += 1
        call.when_ended(self._unstick)
        if self._stuck >= MAX_STUCK:
            raise RewardsStuck(
                f"{self._stuck} reward calls are still running past generator.reward_timeout_s = "
                f"{self._timeout_s:g} s; make the reward functions of task.rewards end, or raise that setting"
            )

    def _unstick(self) -> None:
        self._stuck -= 1


def _called_off() -> bool:
    """Whether somebody has cancelled this very task; a reward function may also raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Raised(Exception):
    """Carries what a function raised in its thread: futures refuse to carry StopIteration, and a loop that meets
    SystemExit or KeyboardInterrupt ends with it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(described(error, caller=__file__))
        self.__cause__ = error


class _ThreadCall:
    """One call in a daemon thread. ``result`` settles on the loop that made it."""

    def __init__(self, function: RewardFunction, arguments: tuple[str, str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self.ended = threading.Event()
        self._late: Callable[[], None] | None = None
        threading.Thread(target=self._run, args=(function, arguments), name="reward", daemon=True).start()

    def when_ended(self, late: Callable[[], None]) -> None:
        """Calls ``late`` on the loop once the function does come back."""
        self._late = late

    def _run(self, function: RewardFunction, arguments: tuple[str, str, str]) -> None:
        try:
            value, error = function(*arguments), None
        except BaseException as raised:  # handed to whoever awaits ``result``; sys.exit is as wrong as any error
            value, error = None, raised
        self.ended.set()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._late is not None:
            self._late()
        if self.result.done():
            return
        if error is not None:
            self.result.set_exception(_Raised(error))
        else:
            self.result.set_result(value)
