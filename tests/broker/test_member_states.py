"""What every broker shows of a generator: what it said of itself, unless its silence or its version say otherwise."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from broker.local import LocalBroker
from broker.messages import Frontier, Member, MemberState


def member(state: MemberState = MemberState.SERVING, *, version: int = 5, incarnation: int = 0) -> Member:
    return Member(
        member_id="g",
        role="generator",
        state=state,
        policy_version=version,
        incarnation=incarnation,
        host="h",
        pid=1,
    )


@pytest.mark.parametrize(
    ("version", "incarnation", "state"),
    [
        (5, 1, MemberState.SERVING),
        (4, 1, MemberState.SERVING),  # within the bound
        (6, 1, MemberState.SERVING),  # on its way to the others
        (3, 1, MemberState.STALE),
        (7, 1, MemberState.STALE),  # nobody has made it
        (-1, 1, MemberState.STALE),
        (5, 0, MemberState.STALE),  # of an abandoned incarnation
    ],
)
def test_who_is_shown_as_serving_is_leased_to_and_who_is_stale_is_not(
    hub: Any, make: Any, version: int, incarnation: int, state: MemberState
) -> None:
    broker = hub.client()
    for _ in range(2):
        broker.open_run(rules=make.rules(max_staleness=1), version=5, frontier=Frontier())
    broker.feed(make.prompts(range(1)))
    broker.report(member(version=version, incarnation=incarnation))
    assert [one.state for one in broker.state().members] == [state]
    leases = broker.lease(member_id="g", policy_version=version, incarnation=incarnation, max_prompts=1, wait_s=0)
    assert len(leases) == (state is MemberState.SERVING)


def test_a_batch_in_training_makes_the_oldest_version_stale_and_the_next_version_ends_that(hub: Any, make: Any) -> None:
    broker = hub.client()
    broker.open_run(rules=make.rules(max_staleness=0, groups_per_step=1), version=5, frontier=Frontier())
    broker.feed(make.prompts(range(2)))
    broker.report(member())
    (lease,) = broker.lease(member_id="g", policy_version=5, incarnation=0, max_prompts=1, wait_s=0)
    broker.push(make.group(lease, [(5, 2)]))
    assert broker.take_batch(version=5, wait_s=0) is not None
    assert [one.state for one in broker.state().members] == [MemberState.STALE]
    broker.report(member(version=6))
    assert [one.state for one in broker.state().members] == [MemberState.SERVING]


@pytest.mark.parametrize("state", ["starting", "syncing", "serving", "draining"])
def test_a_member_is_suspect_from_half_its_time_until_it_is_heard_of_or_gone(hub: Any, make: Any, state: str) -> None:
    broker, said = hub.client(), member(MemberState(state))
    broker.open_run(rules=make.rules(member_timeout_s=1.0), version=5, frontier=Frontier())
    broker.report(said)
    reported = time.monotonic()
    seen: list[str] = []
    while "gone" not in seen and time.monotonic() < reported + 10:
        shown = broker.state().members[0].state
        if not seen or seen[-1] != shown:
            seen.append(shown)
        if len(seen) == 2:
            assert time.monotonic() - reported > 0.5
            broker.report(said)
        time.sleep(0.01)
    assert seen == [state, "suspect", state, "suspect", "gone"]


def test_before_a_run_is_open_members_are_shown_as_they_say() -> None:
    broker = LocalBroker()
    broker.report(member())
    assert broker.state().members == (member(),)


def test_only_generators_can_be_stale() -> None:
    broker = LocalBroker()
    broker.report(replace(member(), role="learner", policy_version=-1))
    assert broker.state().members[0].state is MemberState.SERVING
