from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from weights_sync.held import Held
from weights_sync.manifest import Manifest
from weights_sync.staging import Staging, declare

MODEL = nn.Linear(8, 8)


def version(number: int, *, base: int = -1, incarnation: int = 0) -> tuple[Manifest, Staging]:
    staging = Staging.planned(declare(MODEL), wire_dtype="float32")
    return Manifest(version=number, incarnation=incarnation, entries=staging.entries, base=base), staging


def holding(*numbers: int) -> tuple[Held, dict[int, Staging]]:
    held, stagings = Held(keep=True), {}
    for number in numbers:
        manifest, stagings[number] = version(number)
        held.add(manifest, stagings[number])
    return held, stagings


def same(one: Staging, other: Staging) -> bool:
    return one.buffer.data_ptr() == other.buffer.data_ptr()


def test_the_older_of_two_versions_is_received_into_and_held_no_more() -> None:
    held, stagings = holding(1, 2, 3)
    to_come, _ = version(4)
    assert held.base(version(0, base=1)[0]) is None
    assert same(held.room(to_come, "cpu"), stagings[2])
    assert held.base(version(0, base=2)[0]) is None
    room = held.room(to_come, "cpu")
    assert not any(same(room, staging) for staging in stagings.values()), "the version in use is never written to"
    assert held.base(version(0, base=3)[0]) is stagings[3]


def test_the_base_of_what_is_to_come_is_not_received_into() -> None:
    held, stagings = holding(1, 2)
    to_come, _ = version(3, base=1)
    room = held.room(to_come, "cpu")
    assert not any(same(room, staging) for staging in stagings.values())
    assert held.base(to_come) is stagings[1]


def test_a_version_of_another_incarnation_or_layout_is_no_base_and_no_room() -> None:
    held, stagings = holding(1, 2)
    assert held.base(version(3, base=2, incarnation=1)[0]) is None
    to_come, _ = version(3)
    shorter = replace(to_come, entries=to_come.entries[:1])
    room = held.room(shorter, "cpu")
    assert room.buffer.numel() == shorter.payload_bytes
    assert not any(same(room, staging) for staging in stagings.values())


def test_nothing_is_kept_when_nothing_is_to_be() -> None:
    held = Held(keep=False)
    for number in (1, 2):
        held.add(*version(number))
    assert held.base(version(3, base=2)[0]) is None
    assert torch.is_tensor(held.room(version(3)[0], "cpu").buffer)
