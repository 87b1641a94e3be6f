"""An engine without a model, for tests of everything around engines: its tokens say what they were sampled by.

The log-probability of a token is a function of its id and of the version that sampled it, so that a version label
that went to the wrong token shows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from broker.messages import Prompt, Publication
from generators.engine import EngineDead, NonFiniteLogits, Sample
from weights_sync.errors import SyncFailed


def fake_logprob(version: int, token_id: int) -> float:
    """What version ``version`` gives to a token, as float32 holds it."""
    return float(np.float32(-1.0 - 0.25 * version - 0.001 * token_id))


def ramp(prompt: Prompt, index: int) -> list[int]:
    """``prompt.max_tokens`` ids that tell item and completion apart."""
    return [100 * prompt.position + 10 * index + place for place in range(prompt.max_tokens)]


@dataclass
class FakeEngine:
    """generators.engine.Engine on a clock and dice of its own.

    Args:
        step_s: time of one token.
        fail: chance that a completion is missing from the answer, drawn from ``seed``.
        answer: token ids of completion ``index``.
        garbage: versions whose log-probabilities are not finite; sampling under them raises.
        broken_attempts: publication attempts whose transfer fails.
        raises: raised by every later ``generate``.

        hold_at: the first request to reach this many tokens clears ``running``.

    Every request holds at its next token while ``running`` is clear.
    """

    step_s: float = 0.0
    fail: float = 0.0
    seed: int = 0
    answer: Callable[[Prompt, int], Sequence[int]] = ramp
    garbage: frozenset[int] = frozenset()
    broken_attempts: frozenset[int] = frozenset()
    raises: BaseException | None = None
    hold_at: int = -1
    running: asyncio.Event = field(default_factory=asyncio.Event)
    staged: list[int] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    started: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._version = -1
        self._dice = random.Random(self.seed)
        self._aborted: dict[str, asyncio.Event] = {}
        self.running.set()

    @property
    def policy_version(self) -> int:
        """The version in use; -1 before the first swap."""
        return self._version

    @property
    def swap_stall_s(self) -> float:
        """A swap takes no time here."""
        return 0.0

    async def start(self) -> None:
        """Nothing to load."""
        self.started = True

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """All completions token by token, side by side. Raises ``raises``, NonFiniteLogits or EngineDead."""
        if self._version < 0 or self.closed:
            raise EngineDead("there are no weights to sample with")
        self.sampled.append(prompt.item)
        aborted = self._aborted[request_id] = asyncio.Event()
        answers = [list(self.answer(prompt, index)) for index in range(prompt.n)]
        versions: list[int] = []
        try:
            while len(versions) < max(map(len, answers)) and await self._step(aborted):
                versions.append(self._version)
                if len(versions) == self.hold_at:
                    self.running.clear()
        finally:
            del self._aborted[request_id]
        return [_sample(a, versions, prompt.max_tokens) for a in answers if self._dice.random() >= self.fail]

    async def _step(self, aborted: asyncio.Event) -> bool:
        """Waits for the next token's turn; false when the request has been aborted instead."""
        await asyncio.sleep(self.step_s)
        if not self.running.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.running, aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if self.raises is not None:
            raise self.raises
        if self._version in self.garbage:
            raise NonFiniteLogits(f"non-finite logits at version {self._version}")
        return not aborted.is_set()

    async def abort(self, request_id: str) -> None:
        """Ends a running request; an unknown one is no error, since it may just have ended."""
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def stage(self, publication: Publication, *, member_id: str) -> None:
        """Takes note. Raises SyncFailed for ``broken_attempts``."""
        await asyncio.sleep(self.step_s)
        if publication.attempt in self.broken_attempts:
            raise SyncFailed(f"attempt {publication.attempt} was to fail")
        self.staged.append(publication.version)

    async def swap(self, publication: Publication) -> None:
        """The next token is the new version's."""
        self._version = publication.version

    async def close(self) -> None:
        """Ends every request."""
        self.closed = True
        for aborted in self._aborted.values():
            aborted.set()


def _sample(answer: list[int], versions: list[int], max_tokens: int) -> Sample:
    length = min(len(answer), len(versions))
    finish = "abort" if length < len(answer) else "length" if length == max_tokens else "stop"
    runs: list[list[int]] = []
    for version in versions[:length]:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    logprobs = [fake_logprob(version, token) for version, token in zip(versions, answer[:length], strict=False)]
    return Sample(
        token_ids=np.array(answer[:length], np.int32),
        behavior_logprobs=np.array(logprobs, np.float32),
        version_runs=np.array(runs, np.int32).reshape(-1, 2),
        finish_reason=finish,
    )
