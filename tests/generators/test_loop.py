"""The generator's loop against the real ledger, with an engine whose tokens say what sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker.messages import MemberState, Prompt, Split
from broker.rules import tokens_left
from generators.engine import NonFiniteLogits, Sample
from generators.fake_engine import FakeEngine
from generators.loop import TooManyFailures
from tests.generators.loop_setting import (
    DEADLINE_S,
    TOKENS,
    Learner,
    N,
    assert_tokens_carry_the_version_that_sampled_them,
    generator,
    is_state,
    member,
    prompt,
    prompts,
    run,
    serves,
)


def test_c7_ten_steps_end_cleanly_with_every_version_shipped() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2, max_staleness=1), FakeEngine()
        learner.open()
        learner.broker.feed(prompts(0, 40))
        async with generator(learner, engine) as (task, _):
            await learner.state(is_state(MemberState.SYNCING))
            for version in range(10):
                learner.publish(version)
                batch = await learner.batch(version)
                for group in batch.groups:
                    # A swap in mid-completion leaves older tokens in the group; the learner masks those.
                    assert tokens_left(group.tokens_per_version(), version=version, max_staleness=1) > 0
                learner.broker.trained(batch_id=batch.batch_id, version=version + 1)
            learner.publish(10)
            await learner.state(serves(10))
            learner.broker.finish("done")
            await asyncio.wait({task}, timeout=DEADLINE_S)
            assert task.done()
        state = learner.broker.state()
        assert (state.counts.trained, state.counts.leased, state.members) == (20, 0, ())
        assert state.counts.balanced()

    run(test())


def test_on_policy_runs_do_not_wait_for_a_poll_under_the_old_version() -> None:
    async def test() -> None:
        learner = Learner(groups_per_step=2, max_staleness=0)
        learner.open()
        learner.broker.feed(prompts(0, 20))
        async with generator(learner, FakeEngine()):
            await learner.state(is_state(MemberState.SYNCING))
            for version in range(5):
                learner.publish(version)
                batch = await learner.batch(version)
                assert {v for group in batch.groups for v in group.tokens_per_version()} == {version}
                learner.broker.trained(batch_id=batch.batch_id, version=version + 1)

    run(test())


def test_c27_token_ids_reach_the_learner_as_they_were_sampled() -> None:
    he, llo, hello = 7, 8, 9
    words = {he: "he", llo: "llo", hello: "hello"}

    async def test() -> None:
        learner = Learner(groups_per_step=1)
        learner.open()
        learner.broker.feed(prompts(0, 1, tokens=2))
        engine = FakeEngine(answer=lambda prompt, index: [he, llo] if index else [hello])

        def decode(sample: Sample) -> str:
            return "".join(words[token] for token in sample.token_ids.tolist())

        async with generator(learner, engine, decode=decode):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            (group,) = (await learner.batch(0)).groups
        assert [c.token_ids.tolist() for c in group.completions] == [[hello], [he, llo], [he, llo], [he, llo]]
        assert {c.text for c in group.completions} == {"hello"}
        assert [c.finish_reason for c in group.completions] == ["stop", "length", "length", "length"]

    run(test())


def test_c28_garbage_weights_end_the_generator_and_their_samples_are_never_queued() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2), FakeEngine(garbage=frozenset({1}))
        learner.open()
        async with generator(learner, engine) as (task, _):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(1)
            await learner.state(serves(1))
            learner.broker.feed(prompts(0, 2))
            with pytest.raises(NonFiniteLogits, match="version 1"):
                await task
            state = learner.broker.state()
            assert (state.counts.buffered, state.counts.leased, state.counts.queued) == (0, 0, 2)
            (gone,) = state.members
            assert gone.state is MemberState.GONE
            assert "non-finite logits at version 1" in gone.error

    with pytest.raises(NonFiniteLogits):
        run(test())


def test_c40_every_token_of_twenty_requests_carries_its_own_version_across_a_swap() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=20), FakeEngine(hold_at=3)
        learner.open()
        learner.broker.feed(prompts(0, 20))
        async with generator(learner, engine, groups_in_flight=20):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda state: state.counts.leased == 20 and not engine.running.is_set())
            learner.publish(1)
            await learner.state(serves(1))
            engine.hold_at = -1
            engine.running.set()
            groups = (await learner.batch(0)).groups
        assert_tokens_carry_the_version_that_sampled_them(groups)
        versions = {tuple(group.completions[0].versions().tolist()) for group in groups}
        assert (0, 0, 0, 1, 1, 1) in versions
        assert all(1 in found for found in versions)

    run(test())


def test_c56_an_engine_out_of_memory_is_gone_and_its_work_is_free_again() -> None:
    async def test() -> None:
        learner, engine = Learner(), FakeEngine(raises=MemoryError("out of memory"))
        learner.open()
        learner.broker.feed(prompts(0, 2))
        async with generator(learner, engine) as (task, _):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await asyncio.wait({task}, timeout=DEADLINE_S)
            state = learner.broker.state()
            assert [m.state for m in state.members] == [MemberState.GONE]
            assert "MemoryError" in state.members[0].error
            assert (state.counts.queued, state.counts.leased) == (2, 0)

    with pytest.raises(MemoryError):
        run(test())


def test_c57_failed_completions_are_dropped_and_their_siblings_kept() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=30), FakeEngine(fail=0.1, seed=3)
        learner.open()
        learner.broker.feed(prompts(0, 30))
        async with generator(learner, engine):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            groups = (await learner.batch(0)).groups
        sizes = [len(group.completions) for group in groups]
        assert all(2 <= size <= N for size in sizes)
        assert 0 < sum(group.failed_completions for group in groups) == sum(N - size for size in sizes)

    run(test())


def test_c57_groups_that_all_fail_end_the_generator_by_name() -> None:
    async def test() -> None:
        learner, engine = Learner(max_attempts=100), FakeEngine(fail=1.0)
        learner.open()
        learner.broker.feed(prompts(0, 4))
        async with generator(learner, engine, max_failed_groups=5) as (task, _):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await asyncio.wait({task}, timeout=DEADLINE_S)
            assert task.done()

    with pytest.raises(TooManyFailures, match=r"0 of 4 completions.*2 are needed"):
        run(test())


def test_a_completion_whose_reward_fails_is_counted_and_has_no_reward() -> None:
    async def test() -> None:
        learner = Learner(groups_per_step=1)
        learner.open()
        learner.broker.feed(prompts(0, 1))

        def decode(sample: Sample) -> str:
            return "bad" if sample.token_ids[0] == 0 else "good"

        async with generator(learner, FakeEngine(), rewards="fails_on_bad", decode=decode):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            (group,) = (await learner.batch(0)).groups
        assert (len(group.completions), group.failed_completions) == (3, 1)
        assert {c.reward for c in group.completions} == {1.0}

    run(test())


def test_c60_a_newcomer_holds_the_published_version_before_its_first_lease() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=4), FakeEngine()
        learner.open(version=5)
        learner.broker.feed(prompts(0, 4))
        async with generator(learner, engine, member_id="new"):
            await learner.state(lambda state: bool(state.members) and state.members[0].state is MemberState.SYNCING)
            learner.publish(5, "other")
            learner.publish(5, "other", "new")
            groups = (await learner.batch(5)).groups
        assert engine.staged == [5]
        assert {version for group in groups for version in group.tokens_per_version()} == {5}
        assert {group.generator for group in groups} == {"new"}

    run(test())


def test_nothing_is_leased_before_a_version_is_in_use() -> None:
    async def test() -> None:
        learner, engine = Learner(), FakeEngine(broken_attempts=frozenset({1}))
        learner.open()
        learner.broker.feed(prompts(0, 4))
        async with generator(learner, engine):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            state = await learner.state(lambda s: (m := member(s)) is not None and "SyncFailed" in m.error)
            assert state.counts.leased == 0
            assert engine.sampled == []
            learner.publish(0)
            state = await learner.state(serves(0))
            assert member(state).error == ""  # type: ignore[union-attr]

    run(test())


def test_a_failed_transfer_leaves_the_old_version_serving() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=1), FakeEngine(broken_attempts=frozenset({2}))
        learner.open()
        async with generator(learner, engine):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(serves(0))
            learner.publish(1)
            await learner.state(lambda s: (m := member(s)) is not None and "attempt 2" in m.error)
            learner.broker.feed(prompts(0, 1))
            (group,) = (await learner.batch(0)).groups
        assert set(group.tokens_per_version()) == {0}

    run(test())


def test_a_new_incarnation_aborts_what_runs_and_serves_again_with_its_version() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2), FakeEngine(hold_at=2)
        learner.open()
        learner.broker.feed(prompts(0, 2))
        async with generator(learner, engine):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda state: state.counts.leased == 2 and not engine.running.is_set())
            learner.open()
            learner.publish(0)
            await learner.state(serves(0, incarnation=1))
            engine.hold_at = -1
            engine.running.set()
            batch = await learner.batch(0)
        assert [group.incarnation for group in batch.groups] == [1, 1]
        assert learner.broker.state().counts.events.get("failed", 0) == 0
        assert len(engine.sampled) == 4

    run(test())


def test_a_stop_gives_every_lease_back_and_leaves_no_member() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=4), FakeEngine(hold_at=1)
        learner.open()
        learner.broker.feed(prompts(0, 4))
        async with generator(learner, engine) as (task, stop):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda state: state.counts.leased == 4)
            stop.set()
            await asyncio.wait({task}, timeout=DEADLINE_S)
            state = learner.broker.state()
            assert (state.counts.queued, state.counts.leased, state.members) == (4, 0, ())
            assert state.counts.events.get("failed", 0) == 0

    run(test())


def lengths(*tokens: int) -> Callable[[Prompt, int], list[int]]:
    return lambda prompt, index: list(range(tokens[index]))


def test_a_group_over_its_time_keeps_the_two_completions_that_ended() -> None:
    async def test() -> None:
        learner = Learner(groups_per_step=1)
        learner.open()
        learner.broker.feed(prompts(0, 1))
        engine = FakeEngine(answer=lengths(2, 3, 5, 5), hold_at=4)
        async with generator(learner, engine, group_timeout_s=0.2):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            (group,) = (await learner.batch(0)).groups
        assert [len(c.token_ids) for c in group.completions] == [2, 3]
        assert group.failed_completions == 2

    run(test())


def test_a_group_over_its_time_with_one_completion_counts_an_attempt() -> None:
    async def test() -> None:
        learner = Learner(groups_per_step=1, max_attempts=1)
        learner.open()
        learner.broker.feed(prompts(0, 1))
        engine = FakeEngine(answer=lengths(2, 5, 5, 5), hold_at=4)
        async with generator(learner, engine, group_timeout_s=0.1):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            state = await learner.state(lambda state: bool(state.counts.dead))
        assert list(state.counts.dead) == ["GroupFailed: 1 of 4 completions succeeded, 2 are needed"]

    run(test())


def eval_prompts(version: int, count: int) -> list[Prompt]:
    return [prompt(f"eval{version}.{i}", i, Split.EVAL, 1, TOKENS) for i in range(count)]


def test_c119_a_swap_waits_for_the_evaluation_answers_under_way() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=1), FakeEngine(hold_at=2)
        learner.open()
        learner.broker.feed(eval_prompts(0, 3))
        async with generator(learner, engine, groups_in_flight=3):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda _: len(engine.sampled) == 3 and not engine.running.is_set())
            learner.publish(1)
            await learner.state(lambda _: engine.staged == [0, 1])
            assert engine.policy_version == 0
            engine.hold_at = -1
            engine.running.set()
            await learner.state(serves(1))
            client = learner.broker.client()
            answers = await asyncio.to_thread(client.eval_results, version=0, count=3, wait_s=DEADLINE_S)
        assert [set(group.tokens_per_version()) for group in answers] == [{0}, {0}, {0}]

    run(test())


def test_evaluation_answers_that_take_too_long_do_not_hold_up_the_swap() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=1), FakeEngine(hold_at=2)
        learner.open()
        learner.broker.feed(eval_prompts(0, 1))
        async with generator(learner, engine, grace_s=0.1):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            await learner.state(lambda _: not engine.running.is_set())
            learner.publish(1)
            await learner.state(serves(1))
            assert learner.broker.eval_results(version=0, count=1, wait_s=0.0) == ()

    run(test())


def test_a_generator_that_never_got_a_version_ends_with_the_run() -> None:
    async def test() -> None:
        learner = Learner()
        learner.open()
        async with generator(learner, FakeEngine()) as (task, _):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0, "other")
            learner.broker.finish("done")
            await asyncio.wait({task}, timeout=DEADLINE_S)
            assert task.done()

    run(test())


def test_the_heartbeat_renews_leases_and_tells_rates() -> None:
    async def test() -> None:
        learner, engine = Learner(groups_per_step=2), FakeEngine()
        learner.open()
        learner.broker.feed(prompts(0, 2))
        async with generator(learner, engine):
            await learner.state(is_state(MemberState.SYNCING))
            learner.publish(0)
            state = await learner.state(lambda s: (m := member(s)) is not None and m.stats.get("groups") == 2.0)
            stats = member(state).stats  # type: ignore[union-attr]
            assert stats["tokens_per_s"] > 0
            engine.hold_at = 1
            learner.broker.feed(prompts(2, 4))
            await learner.state(lambda s: (m := member(s)) is not None and len(m.leases) == 2)

    run(test())
