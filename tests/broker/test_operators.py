"""What an operator sees and does: dead prompts, queueing them again, a buffer with bounds, runs with the same names."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from broker import calls
from broker.codec import encode
from broker.contract import Broker, PushOutcome
from broker.errors import BufferFull, Refused
from broker.messages import Batch, Frontier, Lease, Member, MemberState, Publication

LONG_S = 30.0


def opened(hub: Any, make: Any, **rules: Any) -> Broker:
    broker: Broker = hub.client()
    broker.open_run(rules=make.rules(**rules), version=0, frontier=Frontier())
    broker.feed(make.prompts(range(8)))
    return broker


def lease(broker: Broker, n: int = 1, *, version: int = 0, incarnation: int = 0, wait_s: float = 0.0) -> Any:
    return broker.lease(member_id="g", policy_version=version, incarnation=incarnation, max_prompts=n, wait_s=wait_s)


def give_up(broker: Broker, item: str, *, incarnation: int = 0, version: int = 0) -> None:
    """Fails every attempt of the first queued prompt, which must be this one."""
    while item not in [one.item for one in broker.dead_items()]:
        (one,) = lease(broker, incarnation=incarnation, version=version)
        assert one.prompt.item == item
        broker.release(lease_id=one.lease_id, error="reward raised ValueError: 7\nwith a long traceback")


def answer(broker: Broker, make: Any, leases: tuple[Lease, ...], version: int = 0) -> None:
    for one in leases:
        assert broker.push(make.group(one, ((version, 4),))) is PushOutcome.ACCEPTED


def train(broker: Broker, version: int, incarnation: int = 0) -> Batch:
    batch = broker.take_batch(version=version, wait_s=0)
    assert batch is not None
    broker.trained(batch_id=batch.batch_id, version=version + 1)
    return batch


def test_a_dead_prompt_is_listed_with_its_last_error_and_lives_again_when_requeued(hub: Any, make: Any) -> None:
    broker = opened(hub, make)
    give_up(broker, "0")
    (dead,) = broker.dead_items()
    assert (dead.item, dead.position, dead.attempts, dead.error) == ("0", 0, 3, "reward raised ValueError: 7")
    assert broker.state().counts.dead == {"reward raised ValueError: 7": 1}
    for expected in (1, 0):  # the second time it is not dead any more
        assert broker.requeue(["0", "5", "no such item"]) == expected
        assert broker.dead_items() == ()
        counts = broker.state().counts
        assert (counts.queued, counts.dead, counts.events["requeued"]) == (8, {}, 1)
    (again,) = lease(broker)
    assert (again.prompt.item, again.attempt) == ("0", 1)
    assert encode(again.prompt) == encode(make.prompt(0))


@pytest.mark.parametrize("saved", [False, True], ids=["told", "saved"])
def test_a_requeued_prompt_survives_a_learner_whose_checkpoint_has_it_as_ended(
    hub: Any, make: Any, saved: bool
) -> None:
    broker = opened(hub, make)
    give_up(broker, "0")
    answer(broker, make, lease(broker, 2))
    batch = train(broker, 0)
    assert [one.item for one in batch.ended] == ["0"]
    frontier = Frontier().with_ended([0, 1, 2])
    if saved:
        broker.durable(version=1)
    assert broker.requeue(["0"]) == 1
    broker.open_run(rules=make.rules(), version=1, frontier=frontier)
    assert broker.state().counts.queued == 6
    answer(broker, make, lease(broker, 2, version=1, incarnation=1), version=1)
    assert sorted(group.prompt.item for group in train(broker, 1).groups) == ["0", "3"]
    broker.durable(version=2)
    counts = broker.state().counts
    assert (counts.fed, counts.durable, counts.dead) == (8, 4, {})
    broker.open_run(rules=make.rules(), version=2, frontier=frontier.with_ended([3]))
    assert broker.feed(make.prompts(range(8))) == 0, "trained once, and known for ever"


def test_c37_c45_a_full_buffer_makes_producers_wait_and_loses_nothing(hub: Any, make: Any) -> None:
    """Eight groups, room for the batch being gathered and one more: all are trained, none is dropped."""
    size = len(encode(make.group(Lease(lease_id="12345678.1", prompt=make.prompt(0), attempt=1, incarnation=0))))
    room = 3 * size + size // 2
    broker = opened(hub, make, max_staleness=3, max_buffer_bytes=room)
    leases, outcomes = lease(broker, 8), list[PushOutcome]()
    assert len(leases) == 8

    def produce(mine: tuple[Lease, ...]) -> None:
        client = hub.client()
        outcomes.extend([client.push(make.group(one)) for one in mine])

    producers = [threading.Thread(target=produce, args=(leases[i::2],)) for i in range(2)]
    for one in producers:
        one.start()
    trained: list[str] = []
    for version in range(4):
        batch = broker.take_batch(version=version, wait_s=LONG_S)
        assert batch is not None
        state = broker.state()
        assert state.buffered_bytes <= room + 2 * size, "the bound, and the batch being gathered"
        trained += [group.prompt.item for group in batch.groups]
        broker.trained(batch_id=batch.batch_id, version=version + 1)
    for one in producers:
        one.join(LONG_S)
    assert outcomes == [PushOutcome.ACCEPTED] * 8
    assert sorted(trained) == [str(i) for i in range(8)]


def test_nothing_is_leased_while_the_buffer_is_full_and_a_push_gives_up_at_its_deadline(hub: Any, make: Any) -> None:
    broker = opened(hub, make, max_staleness=3, max_buffer_bytes=1)
    leases = lease(broker, 3)
    answer(broker, make, leases[:2])
    assert lease(broker, 1) == ()
    impatient: Any = hub.client()
    impatient._config = impatient._config.model_copy(update={"push_timeout_s": 0.3})
    with pytest.raises(BufferFull, match=r"broker\.push_timeout_s = 0\.3.*broker\.max_buffer_bytes"):
        impatient.push(make.group(leases[2]))
    assert broker.state().counts.leased == 1, "its lease still holds"
    train(broker, 0)
    assert broker.push(make.group(leases[2])) is PushOutcome.ACCEPTED


def test_of_groups_pushed_together_those_without_room_wait_for_it(hub: Any, make: Any) -> None:
    broker = opened(hub, make, max_staleness=3, max_buffer_bytes=1)
    groups = [make.group(one) for one in lease(broker, 4)]
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(hub.client().push_all, groups)
        while broker.state().counts.buffered < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        assert not pushing.done()
        assert (broker.state().counts.buffered, broker.state().counts.leased) == (2, 2)
        train(broker, 0)
        assert pushing.result(LONG_S) == (PushOutcome.ACCEPTED,) * 4
    assert broker.state().counts.events == {}


def test_an_unreadable_group_costs_an_attempt_and_the_batch_is_gathered_anew(hub: Any, make: Any) -> None:
    broker: Any = opened(hub, make, max_attempts=1)
    good, bad = lease(broker, 2)
    head = calls.GroupHead.of(make.group(bad))
    assert broker._call(calls.Push(heads=(head,)), bodies=[b"not a group"]) == (PushOutcome.ACCEPTED,)
    answer(broker, make, (good,))
    assert broker.take_batch(version=0, wait_s=0) is None
    counts = broker.state().counts
    assert (counts.buffered, counts.training, counts.events) == (1, 0, {"malformed": 1})
    (dead,) = broker.dead_items()
    assert dead.item == bad.prompt.item and "malformed" in dead.error
    answer(broker, make, lease(broker))
    batch = train(broker, 0)
    assert [one.item for one in batch.ended] == [bad.prompt.item]


def test_a_group_in_place_of_another_is_not_trained_as_that(hub: Any, make: Any) -> None:
    broker: Any = opened(hub, make)
    first, second = lease(broker, 2)
    head = calls.GroupHead.of(make.group(first))
    broker._call(calls.Push(heads=(head,)), bodies=[encode(make.group(second))])
    answer(broker, make, (second,))
    assert broker.take_batch(version=0, wait_s=0) is None
    assert broker.state().counts.events == {"malformed": 1}


def test_another_run_with_the_same_names_starts_with_empty_books(hub: Any, make: Any) -> None:
    broker = opened(hub, make, run="first")
    leases = lease(broker, 3)
    answer(broker, make, leases[:2])
    train(broker, 0)
    broker.durable(version=1)
    assert broker.open_run(rules=make.rules(run="second"), version=0, frontier=Frontier()) == 1
    counts = broker.state().counts
    assert (counts.fed, counts.durable, counts.leased, counts.events) == (0, 0, 0, {})
    assert broker.push(make.group(leases[2])) is PushOutcome.ABANDONED
    assert broker.feed([replace(prompt, text="another task") for prompt in make.prompts(range(2))]) == 2
    assert [one.prompt.text for one in lease(broker, 2, incarnation=1)] == ["another task"] * 2


def test_c51_who_joins_late_learns_the_current_version_anyway(hub: Any, make: Any) -> None:
    broker = opened(hub, make)
    offer = Publication(version=3, incarnation=0, attempt=1, epoch=1, store="h:1", receivers=("g",))
    broker.publish(offer)
    assert hub.client().publication(after_attempt=0, wait_s=LONG_S) == offer


def test_c49_what_a_dead_learner_held_is_trained_once_by_the_next(hub: Any, make: Any) -> None:
    broker = opened(hub, make, groups_per_step=5)
    answer(broker, make, lease(broker, 5))
    held = broker.take_batch(version=0, wait_s=0)
    assert held is not None and len(held.groups) == 5
    following: Broker = hub.client()
    assert following.open_run(rules=make.rules(groups_per_step=5), version=0, frontier=Frontier()) == 1
    assert following.state().counts.queued + following.state().counts.buffered == 8, "all that were fed"
    again = lease(following, 5, incarnation=1)
    answer(following, make, again)
    batch = following.take_batch(version=0, wait_s=0)
    assert batch is not None
    assert sorted(one.prompt.item for one in batch.groups) == [str(i) for i in range(5)]
    with pytest.raises(Refused, match=r"batch '?0\.0'? cannot become version 1"):
        broker.trained(batch_id=held.batch_id, version=1)
    following.trained(batch_id=batch.batch_id, version=1)
    assert following.state().counts.trained == 5


def test_no_incarnation_is_given_twice_even_by_a_broker_that_has_forgotten_them(hub: Any, make: Any) -> None:
    """Else weights of a lineage that was given up would pass for the new one's."""
    broker: Broker = hub.client()
    assert broker.open_run(rules=make.rules(), version=5, frontier=Frontier(base=3), after=6) == 7
    broker.feed(make.prompts(range(8)))
    assert lease(broker, 1, version=6, incarnation=0) == ()
    (one,) = lease(broker, 1, version=5, incarnation=7)
    assert broker.push(make.group(one, ((6, 4),), incarnation=2)) is PushOutcome.ABANDONED
    assert broker.open_run(rules=make.rules(), version=5, frontier=Frontier(base=3), after=2) == 8


def test_of_two_processes_with_one_id_the_newer_is_the_member_and_the_older_is_told(hub: Any, make: Any) -> None:
    broker = opened(hub, make)

    def report(life: str, state: MemberState = MemberState.SERVING, error: str = "") -> None:
        broker.report(
            Member(
                member_id="g",
                role="generator",
                state=state,
                policy_version=0,
                incarnation=0,
                host="h",
                pid=1,
                error=error,
                life=life,
            )
        )

    report("first")
    report("first")
    report("second")  # a restart after SIGKILL looks the same, and must not wait for the old heartbeat to end
    for state in (MemberState.SERVING, MemberState.GONE):
        with pytest.raises(Refused, match=r"another process has joined as g.*--id"):
            report("first", state)
    (member,) = broker.state().members
    assert (member.life, member.state) == ("second", MemberState.SERVING)
    report("second", MemberState.GONE, "lost its device")
    report("third")
    with pytest.raises(Refused):
        report("second")


@pytest.mark.parametrize(
    "senseless",
    [
        {"lease_timeout_s": float("nan")},
        {"member_timeout_s": float("inf")},
        {"lease_timeout_s": 0.0},
        {"groups_per_step": 0},
        {"max_attempts": 0},
        {"max_buffer_bytes": 0},
        {"max_staleness": -1},
        {"on_stale": "discard"},
    ],
    ids=range(8),
)
def test_rules_that_no_run_can_have_are_refused(hub: Any, make: Any, senseless: dict[str, Any]) -> None:
    broker: Broker = hub.client()
    with pytest.raises(Refused):
        broker.open_run(rules=make.rules(**senseless), version=0, frontier=Frontier())
    with pytest.raises(Refused, match="started"):
        broker.open_run(rules=make.rules(), version=0, frontier=Frontier(), after=1 << 52)
    assert broker.state().incarnation == -1
