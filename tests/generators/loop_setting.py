"""What tests of the generator's loop share: the learner's side of a real ledger, and a running generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from broker.config import BrokerConfig
from broker.local import LocalBroker
from broker.messages import Batch, Frontier, Group, Member, MemberState, Prompt, Publication, Rules, RunState, Split
from generators.config import GeneratorConfig
from generators.engine import Sample
from generators.fake_engine import FakeEngine, fake_logprob
from generators.loop import generate
from generators.scoring import Scorer
from tasks.config import TaskConfig

REWARDS = Path(__file__).with_name("rewards_under_test.py")
DEADLINE_S = 15.0
N, TOKENS = 4, 6


def prompts(first: int, last: int, *, tokens: int = TOKENS) -> list[Prompt]:
    return [prompt(str(position), position, Split.TRAIN, N, tokens) for position in range(first, last)]


def prompt(item: str, position: int, split: Split, n: int, tokens: int) -> Prompt:
    return Prompt(
        item=item,
        position=position,
        epoch=0,
        split=split,
        token_ids=np.array([1, 2], np.int32),
        text=f"prompt {item}",
        reference="",
        n=n,
        temperature=1.0 if split is Split.TRAIN else 0.0,
        max_tokens=tokens,
        seed=position,
    )


class Learner:
    """The learner's side of a broker, without learning."""

    def __init__(self, *, groups_per_step: int = 2, max_staleness: int = 1, max_attempts: int = 3) -> None:
        self.broker = LocalBroker()
        self.rules = Rules(
            max_staleness=max_staleness,
            on_stale="mask",
            groups_per_step=groups_per_step,
            max_attempts=max_attempts,
            lease_timeout_s=30.0,
            member_timeout_s=30.0,
        )
        self.attempt, self.incarnation = 0, -1

    def open(self, version: int = 0) -> None:
        self.incarnation = self.broker.open_run(rules=self.rules, version=version, frontier=Frontier())

    def publish(self, version: int, *receivers: str) -> None:
        self.attempt += 1
        self.broker.publish(
            Publication(
                version=version,
                incarnation=self.incarnation,
                attempt=self.attempt,
                epoch=0,
                store="127.0.0.1:1",
                receivers=receivers or ("g",),
            )
        )

    async def state(self, holds: Callable[[RunState], bool]) -> RunState:
        """The first state for which ``holds``; looks again every few milliseconds, up to the deadline."""
        client = self.broker.client()
        async with asyncio.timeout(DEADLINE_S):
            while not holds(state := client.state()):
                await asyncio.to_thread(client.state, after_revision=state.revision, wait_s=0.02)
        return state

    async def batch(self, version: int) -> Batch:
        batch = await asyncio.to_thread(self.broker.client().take_batch, version=version, wait_s=DEADLINE_S)
        assert batch is not None, f"no batch at {version}: {self.broker.state()}"
        return batch


@asynccontextmanager
async def generator(
    learner: Learner,
    engine: FakeEngine,
    *,
    member_id: str = "g",
    rewards: str = "one",
    decode: Callable[[Sample], str] = lambda sample: " ".join(map(str, sample.token_ids.tolist())),
    groups_in_flight: int = 8,
    max_failed_groups: int = 20,
    leave_grace_s: float = 0.1,
    group_timeout_s: float = DEADLINE_S,
    drain: bool = False,
    grace_s: float = 10.0,
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Event]]:
    """A running generator; the test may end it itself, else it is stopped here and must then return cleanly."""
    stop = asyncio.Event()
    task = asyncio.create_task(
        generate(
            broker=learner.broker.client,
            engine=engine,
            score=Scorer(TaskConfig(rewards={"reward": f"{REWARDS}:{rewards}"}), timeout_s=5.0),
            decode=decode,
            config=GeneratorConfig(
                groups_in_flight=groups_in_flight, max_failed_groups=max_failed_groups, leave_grace_s=leave_grace_s
            ),
            broker_config=BrokerConfig(heartbeat_s=0.05),
            group_timeout_s=group_timeout_s,
            member_id=member_id,
            stop=stop,
            drain=drain,
            grace_s=grace_s,
        )
    )
    try:
        yield task, stop
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=DEADLINE_S)
    assert task.done(), "the generator did not stop"
    assert engine.closed
    task.result()


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await test

    asyncio.run(bounded())


def member(state: RunState, member_id: str = "g") -> Member | None:
    return next((m for m in state.members if m.member_id == member_id), None)


def serves(version: int, incarnation: int = 0, member_id: str = "g") -> Callable[[RunState], bool]:
    def holds(state: RunState) -> bool:
        found = member(state, member_id)
        return found is not None and (found.state, found.policy_version, found.incarnation) == (
            MemberState.SERVING,
            version,
            incarnation,
        )

    return holds


def is_state(wanted: MemberState) -> Callable[[RunState], bool]:
    def holds(state: RunState) -> bool:
        found = member(state)
        return found is not None and found.state is wanted

    return holds


def assert_tokens_carry_the_version_that_sampled_them(groups: Sequence[Group]) -> None:
    for group in groups:
        for completion in group.completions:
            versions = completion.versions().tolist()
            expected = [fake_logprob(v, t) for v, t in zip(versions, completion.token_ids.tolist(), strict=True)]
            assert completion.behavior_logprobs.tolist() == expected
