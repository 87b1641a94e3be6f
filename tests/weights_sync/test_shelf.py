"""Staging slots: which one is filled, sent and kept as the base, and what is sent of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.shelf import Place, Shelf
from weights_sync.slots import Slots
from weights_sync.staging import Staging, declare
from weights_sync.updates import unpack


def slots_of(model: nn.Module, wire_dtype: str = "float32") -> Slots:
    return Slots(declare(model), wire_dtype=wire_dtype, device="cpu")


def put(shelf: Shelf, slots: Slots, version: int, model: nn.Module) -> int:
    slot = shelf.reserve()
    slots.fill(slot, version, model.named_parameters())
    shelf.offered(slot, version)
    return slot


def test_a_newer_version_replaces_the_one_that_waits() -> None:
    model, shelf = nn.Linear(2, 2), Shelf(sparse=True)
    slots = slots_of(model)
    assert put(shelf, slots, 1, model) == put(shelf, slots, 2, model)
    assert shelf.promote()
    assert shelf.shown is not None and shelf.shown.version == 2
    assert not shelf.promote()


def test_a_version_that_is_being_filled_is_not_sent() -> None:
    model, shelf = nn.Linear(2, 2), Shelf(sparse=True)
    put(shelf, slots_of(model), 1, model)
    shelf.reserve()
    assert not shelf.promote() and shelf.waiting is None


def test_filling_the_next_version_leaves_the_one_being_sent_whole() -> None:
    model, shelf = nn.Linear(2, 2), Shelf(sparse=True)
    slots = slots_of(model)
    put(shelf, slots, 1, model)
    shelf.promote()
    assert shelf.shown is not None
    manifest = slots.manifest(shelf.shown.slot, 1, 0, wait_s=1.0)
    payload = slots.payload(manifest, shelf.shown.slot)
    with torch.no_grad():
        model.weight.add_(1)
    put(shelf, slots, 2, model)
    Staging(manifest.entries, buffer=payload.data).verify(manifest)


def test_neither_what_is_sent_nor_the_base_is_ever_the_slot_to_fill() -> None:
    shelf = Shelf(sparse=True)
    for version in range(40):
        slot = shelf.reserve()
        assert slot not in {place.slot for place in (shelf.shown, shelf.base) if place}
        shelf.offered(slot, version)
        if version % 3:
            shelf.promote()
            assert shelf.shown == Place(slot=slot, version=version)
        if version % 5 == 0 and shelf.confirm():
            assert shelf.base == shelf.shown


def test_an_update_is_since_the_version_that_was_confirmed_whatever_was_sent_meanwhile() -> None:
    model, shelf = nn.Linear(40, 40), Shelf(sparse=True)
    slots = slots_of(model)
    held: dict[int, Staging] = {}
    bases = {0: -1, 1: 0, 2: 0, 3: 0, 4: 3, 5: 3, 6: 5, 7: 6}
    for version, base_version in bases.items():
        with torch.no_grad():
            model.weight.view(-1)[[version, version * 100]] += 1
        put(shelf, slots, version, model)
        assert shelf.promote() and shelf.shown is not None
        manifest = slots.manifest(shelf.shown.slot, version, 0, wait_s=1.0)
        assert (shelf.base.version if shelf.base else -1) == base_version
        if shelf.base is None:
            held[version] = Staging(manifest.entries, buffer=slots.payload(manifest, shelf.shown.slot).data.clone())
        else:
            payload = slots.payload(
                manifest, shelf.shown.slot, base_slot=shelf.base.slot, base_version=shelf.base.version
            )
            assert payload.manifest.base == base_version
            assert payload.data.numel() < manifest.payload_bytes / 10
            held[version] = held[base_version].empty_like()
            held[version].buffer.copy_(held[base_version].buffer)
            unpack(held[version], payload.manifest, payload.data)
        held[version].verify(manifest)
        if version in (0, 3, 5, 6):
            assert shelf.confirm()
            assert not shelf.confirm()


def test_without_sparse_updates_no_base_is_kept_and_two_slots_do() -> None:
    shelf, filled = Shelf(sparse=False), set()
    for version in range(5):
        filled.add(shelf.reserve())
        shelf.offered(shelf.reserve(), version)
        shelf.promote()
        assert not shelf.confirm() and shelf.base is None
    assert filled == {0, 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_version_with_a_number_that_is_not_finite_is_not_sent_and_its_tensor_is_named(value: float) -> None:
    model = nn.Linear(4, 4)
    slots = slots_of(model, "bfloat16")
    with torch.no_grad():
        model.weight[1, 2] = value
    slots.fill(0, 3, model.named_parameters())
    with pytest.raises(LayoutRefused, match="version 3 is not sent: weight not finite"):
        slots.manifest(0, 3, 0, wait_s=1.0)


def test_a_version_that_never_comes_is_waited_for_no_longer_than_it_may() -> None:
    slots = slots_of(nn.Linear(2, 2))
    with pytest.raises(SyncFailed, match="version 4 is not in slot 1"):
        slots.manifest(1, 4, 0, wait_s=0.05)
