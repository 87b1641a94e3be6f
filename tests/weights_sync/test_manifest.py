import pickle
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weights_sync.encoding import Encoding
from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.manifest import (
    ALIGNMENT,
    ITEM_BYTES,
    Manifest,
    TensorSpec,
    bucket_spans,
    check_names,
    decode,
    digest,
    encode,
    plan,
    with_digests,
)

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
spec_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), min_size=1, max_size=12).map(
    lambda rows: [TensorSpec(name=f"t{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows)]
)


def manifest_of(specs: list[TensorSpec], **fields: object) -> Manifest:
    entries = plan(specs, wire_dtype="bfloat16")
    manifest = Manifest(version=7, incarnation=2, entries=entries, **fields)  # type: ignore[arg-type]
    return with_digests(manifest, lambda entry: digest(entry.name.encode()))


@given(spec_lists)
def test_slots_are_aligned_and_do_not_overlap(specs: list[TensorSpec]) -> None:
    entries = plan(specs, wire_dtype="float32")
    assert [entry.name for entry in entries] == [spec.name for spec in specs]
    end = 0
    for entry in entries:
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        end = entry.offset + entry.nbytes
    assert Manifest(version=0, incarnation=0, entries=entries).payload_bytes >= end


@given(spec_lists)
def test_a_manifest_survives_the_wire(specs: list[TensorSpec]) -> None:
    manifest = manifest_of(specs, tied={"head": "t0"}, buffers=("t0",))
    assert decode(encode(manifest)) == manifest


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(SyncFailed):
        decode(data)


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_changed_byte_never_gives_an_inconsistent_manifest(place: int, value: int) -> None:
    data = bytearray(encode(manifest_of([TensorSpec(name="a", shape=(3, 5)), TensorSpec(name="b", shape=(7,))])))
    data[place % len(data)] = value
    try:
        manifest = decode(bytes(data))
    except SyncFailed:
        return
    assert sum(-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in manifest.entries) == manifest.payload_bytes
    assert manifest.payload_bytes == 128


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 99),
        ("version", "7"),
        ("entries", [["a", [2], "float32", 64, 8, "0" * 32]]),
        ("entries", [["a", [2], "float32", 0, 9, "0" * 32]]),
        ("entries", [["a", [0], "float32", 0, 0, "0" * 32]]),
        ("entries", [["a", [2], "float99", 0, 8, "0" * 32]]),
        ("entries", [["a", [2], "float32", 0, 8, ""]]),
        ("entries", [["a", [2], "float32", 0, 8, "0" * 32], ["a", [2], "float32", 64, 8, "0" * 32]]),
        ("tied", {"head": "absent"}),
        ("buffers", ["absent"]),
        ("base", 3),
        ("updates", [["whole", 2, 0, 8]]),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    document = msgpack.unpackb(encode(manifest_of([TensorSpec(name="a", shape=(2,))])))
    with pytest.raises(SyncFailed, match="malformed manifest"):
        decode(msgpack.packb({**document, field: value}))


@pytest.mark.parametrize(
    "update",
    [
        ["dense", 1, 1, 5],
        ["sparse", 1, 0, 4],
        ["sparse", 1, 3, 7],
        ["sparse", 3, 1, 15],
        ["sparse", 1, 1, 6],
        ["sparse", -1, 1, -5],
        ["whole", 2, 1, 10],
        ["whole", 1, 0, 4],
        ["whole", 2, 0],
    ],
)
def test_an_update_that_no_sender_makes_is_refused(update: list[object]) -> None:
    document = msgpack.unpackb(encode(manifest_of([TensorSpec(name="a", shape=(2,))])))
    with pytest.raises(SyncFailed, match="malformed manifest"):
        decode(msgpack.packb({**document, "base": 3, "updates": [update]}))


def test_an_update_counts_what_is_sent_and_survives_the_trip() -> None:
    manifest = replace(
        manifest_of([TensorSpec(name="a", shape=(40,)), TensorSpec(name="b", shape=(2,))]),
        base=3,
        updates=(
            Encoding(kind="sparse", count=4, gap_bytes=1, nbytes=12),
            Encoding(kind="whole", count=2, gap_bytes=0, nbytes=4),
        ),
    )
    assert (manifest.wire_bytes, manifest.payload_bytes) == (16, 128 + 64)
    assert decode(encode(manifest)) == manifest


def test_c120_a_pickle_in_place_of_a_manifest_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "pwned"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (target,)  # type: ignore[return-value]

    with pytest.raises(SyncFailed):
        decode(pickle.dumps(Bomb()))
    assert not target.exists()


def test_c4_an_empty_declared_shape_is_refused() -> None:
    with pytest.raises(LayoutRefused, match=r"layer\.weight: declared shape \(0,\) is empty"):
        plan([TensorSpec(name="layer.weight", shape=(0,))], wire_dtype="float32")


def test_c12_a_tied_head_is_left_out_and_named_as_an_alias() -> None:
    specs = [TensorSpec(name="embed", shape=(4, 2)), TensorSpec(name="head", shape=(4, 2))]
    assert [entry.name for entry in plan(specs, wire_dtype="float32", tied={"head": "embed"})] == ["embed"]


def test_c13_an_untied_head_is_sent() -> None:
    specs = [TensorSpec(name="embed", shape=(4, 2)), TensorSpec(name="head", shape=(4, 2))]
    assert [entry.name for entry in plan(specs, wire_dtype="float32", tied={})] == ["embed", "head"]


def test_an_alias_of_something_that_is_not_sent_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="head"):
        plan([TensorSpec(name="embed", shape=(4, 2))], wire_dtype="float32", tied={"head": "absent"})


def test_c15_a_wrong_prefix_is_refused_with_the_names_on_both_sides() -> None:
    with pytest.raises(LayoutRefused, match=r"unknown: x\.a, x\.b; missing: a, b"):
        check_names(wanted=["a", "b"], got=["x.a", "x.b"], who="the model")


def test_c16_no_matching_name_at_all_is_an_error() -> None:
    with pytest.raises(LayoutRefused, match="missing: a"):
        check_names(wanted=["a"], got=[], who="the model")


def test_integers_keep_their_type_on_a_bf16_wire() -> None:
    specs = [TensorSpec(name="weight", shape=(2,)), TensorSpec(name="steps", shape=(2,), dtype="int64", buffer=True)]
    assert [entry.dtype for entry in plan(specs, wire_dtype="bfloat16")] == ["bfloat16", "int64"]


@given(st.integers(0, 5000), st.integers(1, 700))
def test_buckets_cover_the_payload_once(total: int, bucket: int) -> None:
    spans = list(bucket_spans(total, bucket))
    assert [byte for start, stop in spans for byte in range(start, stop)] == list(range(total))
    assert all(0 < stop - start <= bucket for start, stop in spans)
