"""The contract of broker/contract.py, over every backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from broker.codec import encode
from broker.contract import Broker, PushOutcome
from broker.errors import BrokerClosed, NoOpenRun, Refused, RunFinished
from broker.messages import Batch, Frontier, Lease, Member, MemberState, Publication

PROMPT_S = 2.0  # a woken wait is over well before this; the waits themselves last much longer
LONG_S = 20.0


def lease(
    broker: Broker, version: int = 0, *, incarnation: int = 0, n: int = 1, wait_s: float = 0.0, who: str = "g"
) -> Any:
    return broker.lease(member_id=who, policy_version=version, incarnation=incarnation, max_prompts=n, wait_s=wait_s)


def items(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [group.prompt.item for group in batch.groups]


def member(state: MemberState = MemberState.SERVING, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "member_id": "g",
        "role": "generator",
        "state": state,
        "policy_version": 0,
        "incarnation": 0,
        "host": "here",
        "pid": 1,
    }
    return Member(**(fields | changes))


def publication(attempt: int, **changes: Any) -> Publication:
    fields: dict[str, Any] = {
        "version": 0,
        "incarnation": 0,
        "attempt": attempt,
        "epoch": 1,
        "store": "127.0.0.1:1",
        "receivers": ("g",),
    }
    return Publication(**(fields | changes))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.monotonic()
    return call(), time.monotonic() - start


@pytest.fixture
def opened(hub: Any, make: Any) -> Broker:
    broker: Broker = hub.client()
    assert broker.open_run(rules=make.rules(), version=0, frontier=Frontier()) == 0
    return broker


def test_an_item_goes_through_every_state_and_the_books_add_up_at_each(opened: Broker, make: Any) -> None:
    assert opened.feed(make.prompts(range(4))) == 4
    first, second = lease(opened, n=2)
    assert (first.prompt.item, second.prompt.item, first.attempt, first.incarnation) == ("0", "1", 1, 0)
    assert np.array_equal(first.prompt.token_ids, make.prompt(0).token_ids)
    assert opened.state().counts.leased == 2
    assert opened.push(make.group(first)) is PushOutcome.ACCEPTED
    assert opened.push(make.group(second)) is PushOutcome.ACCEPTED
    assert opened.state().counts.buffered == 2
    assert opened.state().buffered_bytes > 0
    batch = opened.take_batch(version=0, wait_s=0)
    assert items(batch) == ["0", "1"]
    assert batch is not None
    assert encode(batch.groups[0]) == encode(make.group(first))
    assert opened.state().counts.training == 2
    opened.trained(batch_id=batch.batch_id, version=1)
    assert (opened.state().version, opened.state().counts.trained) == (1, 2)
    opened.durable(version=1)
    counts = opened.state().counts
    assert (counts.fed, counts.queued, counts.durable, counts.trained) == (4, 2, 2, 0)
    assert counts.balanced()
    assert opened.state().buffered_bytes == 0


def test_repeating_a_call_changes_nothing_more(opened: Broker, make: Any) -> None:
    assert opened.feed(make.prompts(range(3))) == 3
    assert opened.feed(make.prompts(range(4))) == 1
    for one in lease(opened, n=2):
        opened.push(make.group(one))
        assert opened.push(make.group(one)) is PushOutcome.DUPLICATE
    batch = opened.take_batch(version=0, wait_s=0)
    again = opened.take_batch(version=0, wait_s=0)
    assert batch is not None and again is not None
    assert encode(batch) == encode(again)
    for _ in range(2):
        opened.trained(batch_id=batch.batch_id, version=1)
        opened.durable(version=1)
    assert opened.feed(make.prompts(range(4))) == 0, "durable items are known"
    counts = opened.state().counts
    assert (counts.fed, counts.durable, counts.events) == (4, 2, {"duplicate": 2})


def test_a_batch_for_the_wrong_version_is_refused_with_both_versions(opened: Broker) -> None:
    with pytest.raises(Refused, match=r"version 3 .* is at 0 .* next is for 0"):
        opened.take_batch(version=3, wait_s=LONG_S)


def test_a_batch_that_was_not_taken_cannot_be_trained(opened: Broker) -> None:
    with pytest.raises(Refused, match="cannot become version 1"):
        opened.trained(batch_id="0.0", version=1)
    with pytest.raises(Refused, match="cannot be durable"):
        opened.durable(version=1)


def test_the_next_batch_can_be_taken_before_the_first_is_trained(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(4)))
    for one in lease(opened, n=4):
        opened.push(make.group(one))
    first = opened.take_batch(version=0, wait_s=0)
    second = opened.take_batch(version=1, wait_s=0)
    assert (items(first), items(second)) == (["0", "1"], ["2", "3"])
    assert first is not None and second is not None
    with pytest.raises(Refused):
        opened.trained(batch_id=second.batch_id, version=2)
    opened.trained(batch_id=first.batch_id, version=1)
    opened.trained(batch_id=second.batch_id, version=2)
    assert opened.state().version == 2


def test_groups_that_lose_most_at_the_next_version_go_first(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(max_staleness=2), version=5, frontier=Frontier())
    broker.feed(make.prompts(range(4)))
    runs = [((5, 4),), ((3, 1), (5, 3)), ((5, 4),), ((3, 3), (4, 1))]
    for one, run in zip(lease(broker, 5, n=4), runs, strict=True):
        broker.push(make.group(one, run))
    assert items(broker.take_batch(version=5, wait_s=0)) == ["3", "1"]


def test_admission_looks_past_the_batches_that_are_out(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=1, frontier=Frontier())
    broker.feed(make.prompts(range(8)))
    for one in lease(broker, 0, n=2):
        broker.push(make.group(one, ((0, 4),)))
    assert items(broker.take_batch(version=1, wait_s=0)) == ["0", "1"]
    assert lease(broker, 0) == (), "its tokens could not be trained by the batch after this one"
    assert len(lease(broker, 1)) == 1


@pytest.mark.parametrize(("on_stale", "event"), [("mask", "stale"), ("drop", "dropped")])
def test_a_stale_group_is_counted_and_its_prompt_issued_again_without_costing_an_attempt(
    hub: Any, make: Any, on_stale: str, event: str
) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(on_stale=on_stale), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(4)))
    first, second, third, fourth = lease(broker, n=4)
    for one in (first, second):
        broker.push(make.group(one))
    for version in (0, 1):
        batch = broker.take_batch(version=version, wait_s=0)
        assert batch is not None
        broker.trained(batch_id=batch.batch_id, version=version + 1)
        if version == 0:
            broker.push(make.group(third, ((0, 4),)))
            broker.push(make.group(fourth, ((0, 4),)))
    assert broker.state().version == 2
    broker.feed(make.prompts([4]))
    (late,) = lease(broker, 2)
    assert late.prompt.item == "4"
    runs = ((0, 4),) if on_stale == "mask" else ((0, 1), (2, 3))
    broker.push(make.group(late, runs))
    assert broker.take_batch(version=2, wait_s=0) is None
    assert broker.state().counts.events == {event: 1}
    (again,) = lease(broker, 2)
    assert (again.prompt.item, again.attempt) == ("4", 1)


def test_partly_stale_groups_are_kept_under_mask(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(groups_per_step=1), version=5, frontier=Frontier())
    broker.feed(make.prompts([0]))
    broker.push(make.group(lease(broker, 5)[0], ((1, 3), (5, 1))))
    assert items(broker.take_batch(version=5, wait_s=0)) == ["0"]


def test_c32_capacity_after_a_resume_is_the_window_whatever_the_version(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(max_staleness=2, groups_per_step=4), version=100, frontier=Frontier(base=400))
    broker.feed(make.prompts(range(400, 440)))
    assert len(lease(broker, 100, n=40)) == 12


def test_admission_refuses_old_versions_foreign_incarnations_and_versions_nobody_made(
    opened: Broker, make: Any
) -> None:
    opened.feed(make.prompts(range(8)))
    assert lease(opened, -1) == ()
    assert lease(opened, 0, incarnation=1) == ()
    assert lease(opened, 2) == ()
    for one in lease(opened, 1, n=2):
        opened.push(make.group(one, ((1, 4),)))
    assert items(opened.take_batch(version=0, wait_s=0)) == ["0", "1"]
    assert len(lease(opened, 0, n=1)) == 1
    for one in lease(opened, 1, n=1):
        opened.push(make.group(one, ((1, 4),)))
    assert opened.state().counts.leased == 1
    assert lease(opened, 1, n=4) == (), "the window is full"


def test_c41_an_expired_lease_is_replaced_and_wakes_who_waits_for_a_prompt(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(lease_timeout_s=0.3), version=0, frontier=Frontier())
    broker.feed(make.prompts([0]))
    (lost,) = lease(broker)
    (got,), seconds = timed(lambda: lease(broker, wait_s=LONG_S, who="other"))
    assert (got.prompt.item, got.attempt) == ("0", 2)
    assert 0.2 < seconds < PROMPT_S
    assert broker.push(make.group(lost)) is PushOutcome.DUPLICATE
    assert broker.push(make.group(got)) is PushOutcome.ACCEPTED
    assert broker.state().counts.events == {"expired": 1, "duplicate": 1}


def test_a_reported_lease_does_not_expire(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(lease_timeout_s=0.4), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(2)))
    kept, lost = lease(broker, n=2)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        broker.report(member(leases=(kept.lease_id,)))
        broker.state(after_revision=broker.state().revision, wait_s=0.05)
    assert broker.push(make.group(kept)) is PushOutcome.ACCEPTED
    assert broker.push(make.group(lost)) is PushOutcome.DUPLICATE


def test_an_item_is_dead_after_its_last_attempt_and_the_next_batch_says_so(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(3)))
    for attempt in (1, 2, 3):
        (one,) = lease(opened)
        assert (one.prompt.item, one.attempt) == ("0", attempt)
        opened.release(lease_id=one.lease_id, error="engine broke\nwith a long trace")
    counts = opened.state().counts
    assert (counts.dead, counts.events) == ({"engine broke": 1}, {"failed": 3})
    for one in lease(opened, n=2):
        opened.push(make.group(one))
    batch = opened.take_batch(version=0, wait_s=0)
    assert batch is not None
    assert [(one.item, one.position, one.state, one.reason) for one in batch.ended] == [
        ("0", 0, "dead", "engine broke")
    ]
    opened.trained(batch_id=batch.batch_id, version=1)
    opened.durable(version=1)
    assert opened.feed(make.prompts(range(3))) == 0


def test_a_release_without_error_costs_nothing(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts([0]))
    for _ in range(5):
        (one,) = lease(opened)
        assert one.attempt == 1
        opened.release(lease_id=one.lease_id, error="")
        opened.release(lease_id=one.lease_id, error="")
    assert opened.state().counts.events == {"released": 5}


def test_c39_groups_whose_parts_have_not_grown_together_are_refused_and_the_lease_stays(
    opened: Broker, make: Any
) -> None:
    opened.feed(make.prompts(range(2)))
    one, other = lease(opened, n=2)
    whole = make.completion()
    broken = [
        replace(whole, loss_mask=whole.loss_mask[:2]),
        replace(whole, version_runs=np.array([[0, 3]], dtype=np.int32)),
        replace(whole, behavior_logprobs=np.full(4, np.nan, dtype=np.float32)),
    ]
    for completion in broken:
        with pytest.raises(Refused, match="item 0, completion 0"):
            opened.push(make.group(one, completions=(completion,)))
    with pytest.raises(Refused, match="is for item 0, not for 1"):
        opened.push(make.group(one, prompt=other.prompt))
    assert opened.push(make.group(one)) is PushOutcome.ACCEPTED


def test_groups_pushed_together_are_taken_each_by_its_own_lease(hub: Any, make: Any) -> None:
    opened: Broker = hub.client()
    opened.open_run(rules=make.rules(groups_per_step=40), version=0, frontier=Frontier())
    opened.feed(make.prompts(range(40)))
    leases = lease(opened, n=40)
    groups = [make.group(one) for one in leases]
    assert opened.push_all([]) == ()
    assert opened.push_all([groups[0], groups[1], groups[0]]) == (
        PushOutcome.ACCEPTED,
        PushOutcome.ACCEPTED,
        PushOutcome.DUPLICATE,
    )
    opened.release(lease_id=leases[5].lease_id, error="")
    outcomes = opened.push_all(groups)  # more than go into one call
    duplicates = [i for i, outcome in enumerate(outcomes) if outcome is PushOutcome.DUPLICATE]
    assert (len(outcomes), duplicates) == (40, [0, 1, 5])
    counts = opened.state().counts
    assert (counts.queued, counts.leased, counts.buffered, counts.events["duplicate"]) == (1, 0, 39, 4)


def test_of_groups_pushed_together_none_is_taken_when_one_is_refused(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(3)))
    one, two, three = lease(opened, n=3)
    with pytest.raises(Refused, match="is for item 1, not for 2"):
        opened.push_all([make.group(one), make.group(two, prompt=three.prompt)])
    broken = replace(make.completion(), behavior_logprobs=np.full(4, np.nan, dtype=np.float32))
    with pytest.raises(Refused, match="item 1, completion 0"):
        opened.push_all([make.group(one), make.group(two, completions=(broken,))])
    assert opened.state().counts.leased == 3
    assert opened.push_all([make.group(one), make.group(two)]) == (PushOutcome.ACCEPTED,) * 2


def test_a_large_group_arrives_as_it_was_sent_however_often_it_is_asked_for(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(2)))
    groups = [make.group(one, ((0, 50_000 + i),)) for i, one in enumerate(lease(opened, n=2))]
    opened.push_all(groups)
    for _ in range(3):
        batch = opened.take_batch(version=0, wait_s=0)
        assert batch is not None
        assert [encode(group) for group in batch.groups] == [encode(group) for group in groups]


def test_prompts_not_named_by_their_position_are_refused(opened: Broker, make: Any) -> None:
    with pytest.raises(Refused, match="not named by its position 3"):
        opened.feed([replace(make.prompt(3), item="seven")])
    with pytest.raises(Refused, match="one version a call"):
        opened.feed([make.prompt(0, eval_version=1), make.prompt(1, eval_version=2)])
    assert opened.state().counts.fed == 0


def train(broker: Broker, make: Any, version: int, incarnation: int = 0) -> Batch:
    """Generates and trains one batch at ``version``."""
    for one in lease(broker, version, incarnation=incarnation, n=2):
        assert broker.push(make.group(one, ((version, 4),))) is PushOutcome.ACCEPTED
    batch = broker.take_batch(version=version, wait_s=0)
    assert batch is not None
    broker.trained(batch_id=batch.batch_id, version=version + 1)
    return batch


def test_c63_a_restarted_learner_gets_back_what_it_had_not_saved_lowest_position_first(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(8)))
    seen = items(train(broker, make, 0))
    broker.durable(version=1)
    lost = items(train(broker, make, 1))
    assert (seen, lost) == (["0", "1"], ["2", "3"])
    in_flight = lease(broker, 2, n=2)
    assert broker.open_run(rules=make.rules(), version=1, frontier=Frontier(base=2)) == 1
    assert broker.push(make.group(in_flight[0], ((2, 4),))) is PushOutcome.ABANDONED
    for version in (1, 2, 3):
        seen += items(train(broker, make, version, incarnation=1))
    assert seen == [str(i) for i in range(8)]
    counts = broker.state().counts
    assert (counts.fed, counts.durable, counts.trained) == (8, 2, 6)


def test_groups_begun_before_the_restart_count_unless_the_abandoned_policy_sampled_in_them(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(max_staleness=3), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(6)))
    kept, mixed, buffered, doomed = lease(broker, 0, n=4)
    broker.push(make.group(buffered, ((0, 4),)))
    broker.push(make.group(doomed, ((0, 1), (1, 3))))
    assert broker.open_run(rules=make.rules(max_staleness=3), version=0, frontier=Frontier()) == 1
    assert broker.state().counts.buffered == 1
    assert broker.push(make.group(kept, ((0, 4),))) is PushOutcome.ACCEPTED
    assert broker.push(make.group(mixed, ((0, 2), (1, 2)))) is PushOutcome.ABANDONED
    assert items(broker.take_batch(version=0, wait_s=0)) == ["2", "0"]
    assert [one.prompt.item for one in lease(broker, 0, incarnation=1, n=9)] == ["1", "3", "4", "5"]


def test_a_group_that_names_the_new_incarnation_is_judged_by_the_one_it_was_leased_under(
    opened: Broker, make: Any
) -> None:
    opened.feed(make.prompts([0]))
    (begun,) = lease(opened)
    opened.open_run(rules=make.rules(), version=0, frontier=Frontier())
    mixed = make.group(begun, ((0, 2), (1, 2)), incarnation=1)
    assert opened.push(mixed) is PushOutcome.ABANDONED
    assert opened.state().counts.events == {"abandoned": 1}


def test_an_ended_item_is_told_again_when_the_step_that_told_of_it_is_lost(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(3)))
    for _ in range(3):
        opened.release(lease_id=lease(opened)[0].lease_id, error="broke")
    first = train(opened, make, 0)
    opened.open_run(rules=make.rules(), version=0, frontier=Frontier())
    again = train(opened, make, 0, incarnation=1)
    assert [one.item for one in first.ended] == [one.item for one in again.ended] == ["0"]
    assert opened.state().counts.dead == {"broke": 1}


def test_batches_out_are_queued_again_when_a_learner_restarts(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(2)))
    for one in lease(opened, n=2):
        opened.push(make.group(one))
    old = opened.take_batch(version=0, wait_s=0)
    assert old is not None
    assert opened.open_run(rules=make.rules(), version=0, frontier=Frontier()) == 1
    with pytest.raises(Refused, match="incarnation 1"):
        opened.trained(batch_id=old.batch_id, version=1)
    assert opened.state().counts.queued == 2


def test_a_fresh_broker_counts_the_frontier_as_durable(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=7, frontier=Frontier(base=10, beyond=(12, 14)))
    assert broker.feed(make.prompts(range(8, 16))) == 4
    counts = broker.state().counts
    assert (counts.fed, counts.durable, counts.queued) == (16, 12, 4)
    assert [one.prompt.item for one in lease(broker, 7, n=4)] == ["10", "11", "13", "15"]


def test_going_back_behind_the_last_durable_version_forgets_what_lies_after(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(6)))
    for version in range(2):
        train(broker, make, version)
    broker.durable(version=2)
    broker.open_run(rules=make.rules(), version=0, frontier=Frontier())
    assert broker.feed(make.prompts(range(6))) == 4
    assert (broker.state().counts.fed, broker.state().counts.queued) == (6, 6)


def test_evaluation_is_one_round_of_one_version_beside_the_ledger(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(2)))
    assert opened.feed(make.prompts(range(2), eval_version=0)) == 2
    assert opened.feed(make.prompts(range(2), eval_version=0)) == 0
    assert opened.eval_results(version=0, count=2, wait_s=0) == ()
    leases: tuple[Lease, ...] = lease(opened, n=3)
    assert [one.prompt.item for one in leases] == ["eval0.0", "eval0.1", "0"]
    assert lease(opened, 1)[0].prompt.item == "1", "another version gets training prompts only"
    for one in (leases[1], leases[0]):
        assert opened.push(make.group(one)) is PushOutcome.ACCEPTED
        assert opened.push(make.group(one)) is PushOutcome.DUPLICATE
    results = opened.eval_results(version=0, count=2, wait_s=LONG_S)
    assert [group.prompt.item for group in results] == ["eval0.0", "eval0.1"]
    assert opened.state().counts.fed == 2
    assert opened.feed(make.prompts([0], eval_version=1)) == 1
    assert opened.eval_results(version=0, count=2, wait_s=0) == ()


def test_evaluation_results_wait_for_the_last_answer(hub: Any, opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(1), eval_version=0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(timed, lambda: hub.client().eval_results(version=0, count=1, wait_s=LONG_S))
        opened.push(make.group(lease(opened, wait_s=LONG_S)[0]))
        results, seconds = waiting.result(LONG_S)
    assert len(results) == 1
    assert seconds < PROMPT_S


def test_members_join_change_and_leave_with_a_revision_each_but_none_for_a_heartbeat(opened: Broker) -> None:
    revisions = [opened.state().revision]
    for report in (
        member(MemberState.STARTING),
        member(MemberState.SERVING),
        member(MemberState.SERVING, policy_version=1),
        member(MemberState.SERVING, policy_version=1, error="one rollout failed"),
    ):
        opened.report(report)
        opened.report(replace(report, stats={"tokens_per_s": 3.0}))
        revisions.append(opened.state().revision)
    assert revisions == list(range(revisions[0], revisions[0] + 5))
    assert opened.state().members == (replace(report, stats={"tokens_per_s": 3.0}),)
    opened.report(member(MemberState.GONE))
    assert opened.state().members == ()
    assert opened.state().revision == revisions[-1] + 1


def test_a_leaving_member_gives_its_leases_back_and_its_error_stays_visible(opened: Broker, make: Any) -> None:
    opened.feed(make.prompts(range(2)))
    lease(opened, n=1)
    lease(opened, n=1, who="other")
    opened.report(member(MemberState.GONE, error="out of memory"))
    (gone,) = opened.state().members
    assert (gone.state, gone.error) == (MemberState.GONE, "out of memory")
    (again,) = lease(opened, n=2)
    assert (again.prompt.item, again.attempt) == ("0", 2)


def test_a_silent_member_is_gone_and_wakes_who_waits_for_a_revision(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(member_timeout_s=0.3), version=0, frontier=Frontier())
    broker.report(member())
    before = broker.state().revision
    state, seconds = timed(lambda: broker.state(after_revision=before, wait_s=LONG_S))
    assert seconds < PROMPT_S
    (gone,) = state.members
    assert gone.state is MemberState.GONE
    assert "broker.member_timeout_s" in gone.error
    assert state.counts.events == {"members_lost": 1}
    broker.report(member())
    assert broker.state().members == (member(),)


def test_publications_are_state_that_a_late_reader_still_finds(hub: Any, opened: Broker, make: Any) -> None:
    assert opened.publication(after_attempt=-1, wait_s=0) is None
    opened.publish(publication(1))
    opened.publish(publication(1))
    assert hub.client().publication(after_attempt=0, wait_s=LONG_S) == publication(1)
    assert opened.publication(after_attempt=1, wait_s=0) is None
    with pytest.raises(Refused, match="attempt 1 is not above 1"):
        opened.publish(publication(1, version=3))
    with pytest.raises(Refused, match="incarnation 4"):
        opened.publish(publication(9, incarnation=4))
    opened.open_run(rules=make.rules(), version=0, frontier=Frontier())
    assert opened.publication(after_attempt=0, wait_s=0) is None, "its store died with its learner"
    assert opened.state().publication == publication(1), "but attempts go on from it"


def test_waiting_calls_are_woken_by_what_they_wait_for(hub: Any, opened: Broker, make: Any) -> None:
    revision = opened.state().revision
    with ThreadPoolExecutor(4) as pool:
        batch = pool.submit(timed, lambda: hub.client().take_batch(version=0, wait_s=LONG_S))
        leases = pool.submit(timed, lambda: lease(hub.client(), n=2, wait_s=LONG_S))
        state = pool.submit(timed, lambda: hub.client().state(after_revision=revision, wait_s=LONG_S))
        offer = pool.submit(timed, lambda: hub.client().publication(after_attempt=0, wait_s=LONG_S))
        opened.feed(make.prompts(range(2)))
        for one in leases.result(LONG_S)[0]:
            opened.push(make.group(one))
        opened.publish(publication(1))
        opened.report(member())
        assert items(batch.result(LONG_S)[0]) == ["0", "1"]
        assert state.result(LONG_S)[0].members == (member(),)
        assert offer.result(LONG_S)[0] == publication(1)
        assert max(future.result()[1] for future in (batch, leases, state, offer)) < PROMPT_S


def test_waits_end_after_wait_s_with_nothing(opened: Broker) -> None:
    for call in (
        lambda: opened.take_batch(version=0, wait_s=0.2),
        lambda: opened.publication(after_attempt=0, wait_s=0.2),
        lambda: lease(opened, wait_s=0.2) or None,
        lambda: opened.eval_results(version=0, count=1, wait_s=0.2) or None,
    ):
        nothing, seconds = timed(call)
        assert nothing is None
        assert 0.15 < seconds < PROMPT_S
    state, seconds = timed(lambda: opened.state(after_revision=99, wait_s=0.2))
    assert state.revision < 99
    assert 0.15 < seconds < PROMPT_S


def test_finishing_wakes_everyone_and_the_first_reason_stays(hub: Any, opened: Broker, make: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        batch = pool.submit(lambda: hub.client().take_batch(version=0, wait_s=LONG_S))
        leases = pool.submit(lambda: lease(hub.client(), wait_s=LONG_S))
        offer = pool.submit(lambda: hub.client().publication(after_attempt=0, wait_s=LONG_S))
        opened.finish("all steps done")
        opened.finish("something else")
        for future in (batch, leases):
            with pytest.raises(RunFinished, match="all steps done"):
                future.result(PROMPT_S)
        assert offer.result(PROMPT_S) is None
    assert opened.state().finished == "all steps done"
    opened.open_run(rules=make.rules(), version=0, frontier=Frontier())
    assert opened.state().finished == ""


def test_concurrent_clients_never_get_the_same_prompt(hub: Any, opened: Broker, make: Any) -> None:
    opened.open_run(rules=make.rules(groups_per_step=100), version=0, frontier=Frontier())
    opened.feed(make.prompts(range(150)))
    start = threading.Barrier(2)

    def generate(name: str) -> list[str]:
        broker, mine = hub.client(), list[str]()
        start.wait(LONG_S)
        while got := lease(broker, incarnation=1, n=2, who=name):
            for one in got:
                assert broker.push(make.group(one)) is PushOutcome.ACCEPTED
                mine.append(one.prompt.item)
        return mine

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(generate, name) for name in ("a", "b")]
        answered = [item for future in futures for item in future.result(LONG_S)]
    assert sorted(answered, key=int) == [str(i) for i in range(150)]
    assert opened.state().counts.buffered == 150


def test_nothing_but_looking_is_possible_before_a_learner_has_opened_the_run(hub: Any, make: Any) -> None:
    broker = hub.client()
    assert lease(broker) == ()
    broker.report(member())
    assert (broker.state().version, broker.state().rules, broker.state().members) == (-1, None, (member(),))
    for call in (
        lambda: broker.feed(make.prompts([0])),
        lambda: broker.take_batch(version=0, wait_s=LONG_S),
        lambda: broker.trained(batch_id="0.0", version=1),
        lambda: broker.publish(publication(1)),
    ):
        with pytest.raises(NoOpenRun):
            call()


def test_a_closed_client_says_so(hub: Any) -> None:
    broker = hub.client()
    broker.close()
    with pytest.raises(BrokerClosed):
        broker.state()
    broker.close()


def test_c36_feeding_thousands_at_once_keeps_their_order(opened: Broker, make: Any) -> None:
    assert opened.feed(make.prompts(range(1000))) == 1000
    assert [one.prompt.position for one in lease(opened, n=4)] == [0, 1, 2, 3]
