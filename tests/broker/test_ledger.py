"""The ledger over simulated time: field cases in which generators and learner run against each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.codec import decode, encode
from broker.contract import PushOutcome
from broker.errors import RunFinished
from broker.heads import BatchHead, GroupHead
from broker.items import TrainingItems
from broker.ledger import Ledger
from broker.messages import Frontier, Group, Lease, Member, MemberState, Prompt
from broker.reasons import DISTINCT_REASONS, tally
from broker.roster import GONE_KEPT, Roster


@dataclass
class Run:
    """A ledger with one learner and generators that always hold the learner's newest version."""

    make: Any
    ledger: Ledger = field(default_factory=Ledger)
    now: float = 0.0
    incarnation: int = 0
    opened: int = 0
    asked: int = 0

    def open(self, *, version: int = 0, frontier: Frontier | None = None, **rules: Any) -> None:
        self.opened += 1
        self.incarnation = self.ledger.open_run(
            rules=self.make.rules(**rules),
            version=version,
            frontier=frontier or Frontier(),
            token=f"opening{self.opened}",
        )

    def feed(self, positions: Iterable[int]) -> int:
        prompts = [self.make.prompt(position) for position in positions]
        return self.ledger.feed([prompt.item for prompt in prompts], [encode(prompt) for prompt in prompts])

    def lease(self, n: int = 1, *, version: int | None = None, who: str = "g") -> tuple[Lease, ...]:
        self.asked += 1
        leases = self.ledger.lease(
            member_id=who,
            policy_version=self.ledger.version if version is None else version,
            incarnation=self.incarnation,
            max_prompts=n,
            now=self.now,
            token=f"call{self.asked}",
        )
        return tuple(
            Lease(
                lease_id=one.lease_id,
                prompt=decode(self.ledger.prompt(one), Prompt, max_bytes=1 << 20),
                attempt=one.attempt,
                incarnation=self.incarnation,
            )
            for one in leases
        )

    def answer(self, lease: Lease, runs: Any = None) -> PushOutcome | None:
        group = self.make.group(lease, runs or ((self.ledger.version, 4),))
        return self.ledger.push([GroupHead.of(group)], [encode(group)])[0]

    def take(self) -> tuple[BatchHead, list[Group]] | None:
        batch = self.ledger.take_batch(version=self.ledger.version)
        if batch is None:
            return None
        return batch, [decode(body, Group, max_bytes=1 << 20) for body in self.ledger.bodies(batch)]

    def train(self) -> list[Group] | None:
        taken = self.take()
        if taken is not None:
            self.ledger.trained(batch_id=taken[0].batch_id, version=self.ledger.version + 1)
        return taken[1] if taken else None

    def outstanding(self) -> int:
        counts = self.ledger.items.counts()
        assert counts.balanced(), counts
        return counts.leased + counts.buffered + counts.training


@pytest.fixture
def run(make: Any) -> Run:
    return Run(make)


def test_c7_instant_generators_are_paced_by_the_learner_and_both_end_together(run: Run, make: Any) -> None:
    run.open()
    run.feed(range(100))
    for _ in range(10):
        for lease in run.lease(100):
            run.answer(lease)
        assert run.outstanding() == 4, "never further ahead than (staleness + 1) batches"
        assert run.train() is not None
    run.ledger.finish("10 steps")
    assert run.ledger.version == 10
    with pytest.raises(RunFinished):
        run.lease()


def test_c34_no_batch_holds_a_group_without_a_token_inside_the_bound(run: Run, make: Any) -> None:
    """Three generators answer 0 to 2 steps after leasing, with the version that they leased with."""
    run.open()
    run.feed(range(2000))
    working: list[tuple[int, Lease, int]] = []
    oldest = 0
    while run.ledger.version < 200:
        run.now += 1
        working += [(int(run.now) + i % 3, one, run.ledger.version) for i, one in enumerate(run.lease(4))]
        for due, lease, version in [one for one in working if one[0] <= run.now]:
            working.remove((due, lease, version))
            run.answer(lease, ((version, 4),))
        version = run.ledger.version
        for group in run.train() or ():
            oldest = max(oldest, version - max(group.tokens_per_version()))
        assert run.outstanding() <= 4
    assert oldest <= 1


def test_c36_a_slow_prompt_is_trained_as_often_as_it_is_in_the_data_and_nothing_is_discarded(
    run: Run, make: Any
) -> None:
    """One prompt in ten takes five times as long; weights arrive in mid-generation, one token a tick."""
    run.open(groups_per_step=4)
    run.feed(range(400))
    working: list[tuple[Lease, list[tuple[int, int]]]] = []
    trained: list[int] = []
    while run.ledger.version < 50:
        run.now += 1
        working += [(lease, []) for lease in run.lease(8)]
        for lease, tokens in list(working):
            tokens.append((run.ledger.version, 1))
            if len(tokens) == (5 if lease.prompt.position % 10 == 0 else 1):
                working.remove((lease, tokens))
                assert run.answer(lease, tokens) is PushOutcome.ACCEPTED
        trained += [group.prompt.position for group in run.train() or ()]
    share = sum(position % 10 == 0 for position in trained) / len(trained)
    assert 0.08 <= share <= 0.12
    assert run.ledger.items.counts().events == {}


def test_c41_three_rollouts_that_never_return_are_replaced_and_counted(run: Run, make: Any) -> None:
    run.open(groups_per_step=128, max_staleness=0, lease_timeout_s=2.0)
    run.feed(range(128))
    for lease in run.lease(128)[3:]:
        run.answer(lease)
    assert run.train() is None
    assert run.ledger.next_deadline() == 2.0
    run.now = 2.0
    run.ledger.expire(run.now)
    assert run.ledger.items.counts().events == {"expired": 3}
    for lease in run.lease(128, who="replacement"):
        assert lease.attempt == 2
        run.answer(lease)
    batch = run.train()
    assert batch is not None and len(batch) == 128


def test_c43_the_feed_goes_on_over_epochs_and_its_tail_waits_instead_of_hanging(run: Run, make: Any) -> None:
    """Ten prompts, batches of four: seven steps need three epochs; two items of the third are left over."""
    run.open(groups_per_step=4)
    trained: list[int] = []
    for position in range(30):
        run.feed([position])
        for lease in run.lease(8):
            run.answer(lease)
        trained += [group.prompt.position % 10 for group in run.train() or ()]
    assert (run.ledger.version, len(trained)) == (7, 28)
    assert run.train() is None
    assert run.ledger.items.counts().buffered == 2


@pytest.mark.parametrize("saved_at", range(1, 6))
def test_c64_wherever_a_learner_dies_every_item_is_trained_once_into_what_survives(
    run: Run, make: Any, saved_at: int
) -> None:
    """Six steps, a checkpoint after ``saved_at`` of them, death, then the rest from that checkpoint."""
    run.open()
    run.feed(range(20))
    frontier, kept = Frontier(), list[int]()
    for _ in range(6):
        for lease in run.lease(3):
            run.answer(lease)
        batch = run.train()
        assert batch is not None
        if run.ledger.version <= saved_at:
            positions = [group.prompt.position for group in batch]
            frontier, kept = frontier.with_ended(positions), kept + positions
        if run.ledger.version == saved_at:
            run.ledger.durable(version=saved_at)
    run.open(version=saved_at, frontier=frontier)
    while (counts := run.ledger.items.counts()).queued or counts.buffered or counts.leased:
        for lease in run.lease(3):
            run.answer(lease)
        batch = run.train()
        assert batch is not None
        kept += [group.prompt.position for group in batch]
    assert sorted(kept) == list(range(20))


def test_c66_a_full_buffer_at_the_restart_does_not_stop_the_run(run: Run, make: Any) -> None:
    run.open()
    run.feed(range(20))
    for lease in run.lease(8):
        run.answer(lease)
    assert run.outstanding() == 4
    run.open(version=0)
    for step in range(5):
        assert run.train() is not None, f"step {step}"
        for lease in run.lease(8):
            run.answer(lease)


def test_an_open_call_sent_again_is_not_a_new_incarnation(make: Any) -> None:
    ledger = Ledger()
    for token, expected in (("a", 0), ("a", 0), ("b", 1)):
        got = ledger.open_run(rules=make.rules(), version=0, frontier=Frontier(), token=token)
        assert got == expected


def test_c62_memory_is_of_the_window_once_items_are_durable(run: Run, make: Any) -> None:
    run.open()
    for start in range(0, 2000, 2):
        run.feed(range(start, start + 2))
        for lease in run.lease(2):
            run.answer(lease)
        assert run.train() is not None
        run.ledger.durable(version=run.ledger.version)
        run.now += 60.0
        run.ledger.expire(run.now)
    items: TrainingItems = run.ledger.items
    sizes = [len(items.pool.items), len(items.pool._heap), len(items.pool._ends), len(items.trained_at)]
    assert max(*sizes, len(items.ended), len(items.frontier.beyond)) <= run.make.rules().window, sizes
    assert run.ledger.items.counts().durable == 2000


def test_reasons_cannot_grow_without_bound() -> None:
    counts: dict[str, int] = {}
    names = {tally(counts, f"error {i}") for i in range(3 * DISTINCT_REASONS)}
    assert len(names) == DISTINCT_REASONS + 1
    assert sum(counts.values()) == 3 * DISTINCT_REASONS


def test_only_the_last_failed_members_stay_visible() -> None:
    roster = Roster()
    for i in range(2 * GONE_KEPT):
        gone = Member(
            member_id=f"g{i}",
            role="generator",
            state=MemberState.GONE,
            policy_version=0,
            incarnation=0,
            host="h",
            pid=1,
            error="broke",
        )
        assert roster.report(gone, now=0.0)
        assert not roster.report(gone, now=0.0)
    assert set(roster.members) == {f"g{i}" for i in range(GONE_KEPT, 2 * GONE_KEPT)}
