"""Learner ranks that each send their own part of a version: the publisher on rank 0, a PartSender on another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from broker.local import LocalBroker
from weights_sync.config import WeightsSyncConfig
from weights_sync.disk import Disk
from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.groups import Group
from weights_sync.manifest import Manifest, check_parts, plan
from weights_sync.members import live
from weights_sync.part_sender import PartSender
from weights_sync.publisher import Publisher
from weights_sync.relay import Relay
from weights_sync.staging import declare, shard_of

RANKS = 3


class Learner:
    """Three ranks of a learner in one process, which all have the model and send a third each."""

    def __init__(self, run: LocalBroker, model: nn.Module, config: WeightsSyncConfig) -> None:
        self.model = model
        self.publisher = Publisher(
            config=config, connect=run.client, declaration=declare(model, parts=RANKS), incarnation=0
        )
        self.others = [
            PartSender(
                config=config,
                address=self.publisher.address,
                declaration=declare(model, part=part, parts=RANKS),
                incarnation=0,
                connect=run.client,
            )
            for part in range(1, RANKS)
        ]

    def part(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            start, count = shard_of(parameter.numel(), rank, RANKS)
            if count:
                mine = parameter.detach().reshape(-1)[start : start + count]
                yield name, mine.view(parameter.shape) if count == parameter.numel() else mine
        if rank == 0:
            yield from self.model.named_buffers()

    def offer(self, version: int) -> dict[str, Tensor]:
        slot = self.publisher.reserve()
        for rank, other in enumerate(self.others, start=1):
            other.offer(version, self.part(rank), slot)
        self.publisher.offer(version, self.part(0), slot)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}

    def await_members(self, count: int) -> None:
        """Before the first offer: ``flush`` waits for those alone that the publisher knows of."""
        with self.publisher._changed:
            assert self.publisher._changed.wait_for(lambda: len(live(self.publisher._members)) == count, timeout=20)

    def close(self) -> None:
        self.publisher.close()
        for other in self.others:
            other.close()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 7), nn.Linear(7, 1))  # the last bias has one element
    model.register_buffer("scale", torch.ones(2))
    return model


@pytest.fixture
def learner(run: LocalBroker, model: nn.Module, sync: WeightsSyncConfig) -> Iterator[Learner]:
    learner = Learner(run, model, sync)
    yield learner
    learner.close()


def change(model: nn.Module, elements: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[-elements:] += 1


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_the_parts_of_all_ranks_are_one_version_whole_and_as_updates(learner: Learner, model, follow, sync) -> None:
    (one, first), (_, second) = follow("g1", sync), follow("g2", sync)
    learner.await_members(2)
    sent = []
    for version in range(4):
        change(model, 1)
        wanted = learner.offer(version)
        learner.publisher.flush(20)
        assert_equal(first.versions[version], wanted)
        assert_equal(second.versions[version], wanted)
        sent.append((learner.publisher.stats.wire_bytes, learner.publisher.stats.payload_bytes))
    assert sent[0][0] == sent[0][1]
    assert {wire for wire, _ in sent[1:]} == {3 * (4 + 1) + 3 * 4}, "one element of each, where a part has more than it"
    assert learner.publisher.stats.failed_attempts == 0
    assert one.attempts[-1].senders == RANKS


@pytest.mark.parametrize("sync", ["collective", "disk"], indirect=True)
def test_a_receiver_killed_in_the_part_of_another_rank_does_not_keep_the_other_from_the_version(
    learner: Learner, model, follow, spawn, sync
) -> None:
    _, kept = follow("g1", sync)
    spawn("g2", sync, die_at=4 if sync.transport == "collective" else 2)  # in the second part
    wanted = learner.offer(0)
    done = threading.Event()
    with learner.publisher._changed:
        assert learner.publisher._changed.wait_for(lambda: 0 in kept.versions or done.wait(0.05), timeout=60)
    assert_equal(kept.versions[0], wanted)


def breaking_put(put: Callable[..., None], failed: threading.Event) -> Callable[..., None]:
    def breaking(depot: object, name: str, data: object) -> None:
        if name.endswith("/2.0") and not failed.is_set():
            failed.set()
            raise SyncFailed("the cable is out")
        put(depot, name, data)

    return breaking


def test_what_another_rank_cannot_send_is_told_by_its_rank_and_sent_again(
    learner: Learner, model, follow, sync, monkeypatch
) -> None:
    _, receiver = follow("g1", sync)
    broadcast, failed = Group.broadcast, threading.Event()

    def breaking(group: Group, tensor: Tensor) -> None:
        if threading.current_thread().name == "transfer" and group.rank == 0 and not failed.is_set():
            in_part = tensor.dtype == torch.uint8 and b"\xa4part\x02" in tensor.numpy().tobytes()
            if in_part:
                failed.set()
                raise SyncFailed("the cable is out")
        broadcast(group, tensor)

    monkeypatch.setattr(Group, "broadcast", breaking)
    for kind in (Disk, Relay):
        monkeypatch.setattr(kind, "put", breaking_put(kind.put, failed))
    learner.await_members(1)
    wanted = learner.offer(0)
    learner.publisher.flush(30)
    assert_equal(receiver.versions[0], wanted)
    assert failed.is_set() and learner.publisher.stats.failed_attempts >= 1


def test_a_nan_in_the_part_of_another_rank_ends_the_publisher_with_its_name(
    learner: Learner, model, follow, sync
) -> None:
    _, receiver = follow("g1", sync)
    with torch.no_grad():
        model[0].weight[15, 15] = float("nan")
    learner.await_members(1)
    learner.offer(0)
    with pytest.raises(LayoutRefused, match=r"version 0 is not sent: 0\.weight not finite"):
        learner.publisher.flush(30)
    assert receiver.versions == {}


def parts_of(model: nn.Module) -> list[Manifest]:
    declarations = [declare(model, part=part, parts=RANKS) for part in range(RANKS)]
    return [
        Manifest(
            version=3, incarnation=0, entries=plan(one.specs, wire_dtype="float32"), part=one.part, parts=one.parts
        )
        for one in declarations
    ]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda parts: parts[:2], "part 0 of 3 .* came as part 0 of 2"),
        (lambda parts: [parts[0], parts[2], parts[1]], "part 2 of 3 .* came as part 1 of 3"),
        (lambda parts: [parts[0], parts[1], Manifest(**{**vars(parts[2]), "version": 4})], "came as part 2 of 3"),
        (lambda parts: [*parts[:2], Manifest(**{**vars(parts[2]), "entries": ()})], "lacks elements of 0.weight"),
        (
            lambda parts: [parts[0], Manifest(**{**vars(parts[1]), "entries": parts[0].entries}), parts[2]],
            "0.weight: part 1 begins at 0, not 86",
        ),
    ],
)
def test_parts_that_are_not_one_version_are_refused(
    model: nn.Module, spoil: Callable[[list[Manifest]], list[Manifest]], complaint: str
) -> None:
    check_parts(parts_of(model))
    with pytest.raises(SyncFailed, match=complaint):
        check_parts(spoil(parts_of(model)))


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("elements", [1, 2, 6, 7, 8, 100])
def test_shards_cover_a_tensor_once(elements: int, parts: int) -> None:
    places = [place for part in range(parts) for place in range(*_span(shard_of(elements, part, parts)))]
    assert places == list(range(elements))


def _span(shard: tuple[int, int]) -> tuple[int, int]:
    return shard[0], shard[0] + shard[1]
