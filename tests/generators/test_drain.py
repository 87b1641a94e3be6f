"""``weights_sync.on_update: drain``: what runs ends under the version it began with, then comes the swap."""

from __future__ import annotations

import asyncio

from broker.messages import MemberState
from generators.fake_engine import FakeEngine
from tests.generators.loop_setting import (
    Learner,
    assert_tokens_carry_the_version_that_sampled_them,
    generator,
    is_state,
    member,
    prompts,
    run,
    serves,
)


def test_with_drain_no_completion_has_two_versions_and_no_prompt_is_lost() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2, max_staleness=3), FakeEngine(step_s=0.001)
        learner.open()
        learner.broker.feed(prompts(0, 40))
        seen = []
        async with generator(learner, engine, drain=True):
            await learner.state(is_state(MemberState.SYNCING))
            for version in range(12):
                learner.publish(version)
                await learner.state(serves(version))
                batch = await learner.batch(version)
                seen += batch.groups
                learner.broker.trained(batch_id=batch.batch_id, version=version + 1)
        assert {tuple({*c.versions().tolist()}) for g in seen for c in g.completions} > {(0,), (5,)}
        assert all(len(c.version_runs) == 1 for g in seen for c in g.completions)
        assert_tokens_carry_the_version_that_sampled_them(seen)
        counts = learner.broker.state().counts
        assert (counts.trained, counts.leased, counts.events.get("failed", 0)) == (24, 0, 0)
        assert len({g.prompt.item for g in seen}) == len(seen) == 24
        assert counts.balanced()

    run(test())


def test_a_draining_generator_takes_no_new_prompt_and_swaps_when_the_last_answer_has_ended() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2), FakeEngine(hold_at=2)
        learner.open()
        learner.broker.feed(prompts(0, 1))
        async with generator(learner, engine, drain=True):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda _: len(engine.sampled) == 1 and not engine.running.is_set())
            learner.publish(1)
            await learner.state(lambda s: engine.staged == [0, 1] and is_state(MemberState.SYNCING)(s))
            learner.broker.feed(prompts(1, 2))
            await asyncio.sleep(0.1)
            assert (engine.policy_version, engine.sampled) == (0, ["0"])
            engine.hold_at = -1
            engine.running.set()
            groups = (await learner.batch(0)).groups
        assert {g.prompt.item: set(g.tokens_per_version()) for g in groups} == {"0": {0}, "1": {1}}

    run(test())


def test_what_has_not_ended_in_time_is_given_back_and_answered_under_the_new_version() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=1), FakeEngine(hold_at=2)
        learner.open()
        learner.broker.feed(prompts(0, 1))
        async with generator(learner, engine, drain=True, grace_s=0.1):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda _: not engine.running.is_set())
            learner.publish(1)
            await learner.state(serves(1))
            engine.hold_at = -1
            engine.running.set()
            (group,) = (await learner.batch(0)).groups
        assert set(group.tokens_per_version()) == {1}
        assert learner.broker.state().counts.events == {"released": 1}

    run(test())


def test_a_swap_does_not_wait_for_rewards() -> None:
    async def test() -> None:
        learner = Learner(groups_per_step=1)
        learner.open()
        learner.broker.feed(prompts(0, 1))
        async with generator(learner, FakeEngine(), drain=True, rewards="slow"):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda s: s.counts.leased == 1)
            learner.publish(1)
            state = await learner.state(serves(1))
            assert len(member(state).leases) == 1  # type: ignore[union-attr]

    run(test())


def test_who_is_told_to_leave_is_draining_until_what_runs_has_ended_and_takes_nothing_new() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2), FakeEngine(hold_at=2)
        learner.open()
        learner.broker.feed(prompts(0, 1))
        async with generator(learner, engine, leave_grace_s=10.0) as (task, stop):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda _: not engine.running.is_set())
            stop.set()
            await learner.state(is_state(MemberState.DRAINING))
            learner.broker.feed(prompts(1, 2))
            engine.hold_at = -1
            engine.running.set()
            await task
        state = learner.broker.state()
        assert (state.counts.buffered, state.counts.queued, state.members) == (1, 1, ())
        assert state.counts.events.get("failed", 0) == 0

    run(test())
