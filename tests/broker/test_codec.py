"""Frames: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import struct
import types
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from broker import calls, messages
from broker.codec import decode, encode
from broker.errors import Refused
from broker.frame import Writer
from broker.messages import SCHEMA_VERSION, Completion, Frontier, Group, Lease, Prompt, Publication
from broker.wellformed import refuse_malformed

LIMIT = 1 << 20
MESSAGES = sorted(
    (kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)),
    key=lambda kind: kind.__name__,
)


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Anything of a declared type, built from the same hints as the codec."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        fields = {name: strategy(kind) for name, kind in get_type_hints(hint).items()}
        return st.builds(hint, **fields)  # type: ignore[arg-type]
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=2)
    if origin in (Union, types.UnionType):
        return st.none() | strategy(next(arg for arg in args if arg is not type(None)))
    if origin is np.ndarray:
        return hnp.arrays(get_args(args[1])[0], hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=3))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**53), 2**53),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=5),
        bool: st.booleans(),
    }
    return scalars[hint]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and type(a) is type(b)


@pytest.mark.parametrize("kind", [*MESSAGES, *calls.CALLS.values()], ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_message_survives_the_trip(kind: type, data: Any) -> None:
    value = data.draw(strategy(kind))
    assert same(decode(encode(value), kind, max_bytes=LIMIT), value)


@pytest.mark.parametrize("kind", calls.CALLS.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_every_answer_survives_the_trip(kind: Any, data: Any) -> None:
    hint = calls.answer_type(kind)
    value = None if hint is type(None) else data.draw(strategy(hint))
    assert same(decode(encode(value, hint), hint, max_bytes=LIMIT), value)


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(Refused):
        decode(junk, Group, max_bytes=LIMIT)


@given(data=st.data(), position=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=50, deadline=None)
def test_a_changed_byte_gives_a_group_or_a_refusal_never_anything_else(data: Any, position: int, byte: int) -> None:
    frame = bytearray(encode(data.draw(strategy(Group))))
    frame[position % len(frame)] = byte
    with contextlib.suppress(Refused):
        assert isinstance(decode(bytes(frame), Group, max_bytes=LIMIT), Group)


def altered(field: str, value: Any, make: Any) -> bytes:
    """A completion's frame with one field replaced on the wire."""
    frame = encode(make.completion())
    (size,) = struct.unpack_from("<I", frame)
    schema, name, body = msgpack.unpackb(frame[4 : 4 + size])
    body[[one.name for one in dataclasses.fields(Completion)].index(field)] = value
    raw, writer = frame[4 + size + -(4 + size) % 8 :], Writer()
    writer.add([raw], len(raw))
    return writer.frame([schema, name, body])


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("token_ids", ["<i8", [4]], r"\.token_ids: dtype '<i8' where '<i4'"),
        ("token_ids", [">i4", [4]], r"dtype '>i4' where '<i4'"),
        ("token_ids", ["<i4", [400]], "48 raw bytes left where 1600 are declared"),
        ("token_ids", ["<i4", [1 << 62]], "raw bytes left where"),
        ("token_ids", ["<i4", [0, 1 << 63]], "malformed"),
        ("token_ids", ["<i4", [2]], "8 raw bytes that nothing declares"),
        ("token_ids", ["<i4", [-1]], "not a list of sizes"),
        ("token_ids", ["<i4", 4], "not a list of sizes"),
        ("token_ids", ["|O", [4]], "dtype '|O'"),
        ("token_ids", [1, 2, 3], r"not \[dtype, shape\]"),
        ("reward", 1, r"\.reward: int where float"),
        ("reward", True, "bool where float"),
        ("finish_reason", b"stop", "bytes where str"),
        ("reward_parts", {"a": "b"}, r"\.reward_parts\['a'\]: str where float"),
        ("reward_parts", [], "list where dict"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(field: str, value: Any, complaint: str, make: Any) -> None:
    with pytest.raises(Refused, match=complaint):
        decode(altered(field, value, make), Completion, max_bytes=LIMIT)


def test_a_nested_complaint_names_the_whole_path(make: Any) -> None:
    right, _ = make.group(lease := Lease(lease_id="l", prompt=make.prompt(0), attempt=1, incarnation=0)).completions
    bad = dataclasses.replace(right, token_ids=right.token_ids.astype(np.int64))
    with pytest.raises(Refused, match=r"Group: \.completions\[1\]\.token_ids: int64 where an array of int32"):
        encode(make.group(lease, completions=(right, bad)))


def test_frames_of_another_schema_type_or_size_are_refused() -> None:
    frame = encode(Frontier(base=3))
    with pytest.raises(Refused, match="'Frontier' where Prompt was expected"):
        decode(frame, Prompt, max_bytes=LIMIT)
    with pytest.raises(Refused, match=r"broker\.max_frame_bytes = 4"):
        decode(frame, Frontier, max_bytes=4)
    other = Writer().frame([SCHEMA_VERSION + 1, "Frontier", [3, []]])
    with pytest.raises(Refused, match=f"wire schema {SCHEMA_VERSION + 1} where {SCHEMA_VERSION}"):
        decode(other, Frontier, max_bytes=LIMIT)
    for body in ([3], [3, [], 4], {"base": 3}):
        with pytest.raises(Refused, match="malformed Frontier"):
            decode(Writer().frame([SCHEMA_VERSION, "Frontier", body]), Frontier, max_bytes=LIMIT)


def test_a_frame_cut_short_or_with_something_behind_it_is_refused(make: Any) -> None:
    frame = encode(make.completion())
    for cut in range(len(frame)):
        with pytest.raises(Refused):
            decode(frame[:cut], Completion, max_bytes=LIMIT)
    with pytest.raises(Refused, match="8 raw bytes that nothing declares"):
        decode(frame + bytes(8), Completion, max_bytes=LIMIT)


def test_arrays_of_any_layout_come_back_as_they_were(make: Any) -> None:
    ids = np.arange(12, dtype=np.int32)
    for laid_out in (ids[::3], ids.reshape(4, 3)[:, 1], ids[::-1][:4], ids.astype(">i4")[:4], ids[:0]):
        value = dataclasses.replace(make.completion(), token_ids=laid_out)
        assert np.array_equal(decode(encode(value), Completion, max_bytes=LIMIT).token_ids, laid_out)
        group = make.group(Lease(lease_id="l", prompt=make.prompt(0), attempt=1, incarnation=0), completions=(value,))
        assert np.array_equal(decode(encode(group), Group, max_bytes=LIMIT).completions[0].token_ids, laid_out)


def test_decoded_arrays_start_where_processors_like_them_to(make: Any) -> None:
    copy = decode(encode(make.completion()), Completion, max_bytes=LIMIT)
    for array in (copy.token_ids, copy.behavior_logprobs, copy.version_runs):
        assert array.flags.aligned


def test_decoded_arrays_are_views_that_nobody_can_write_to(make: Any) -> None:
    copy = decode(encode(make.completion()), Completion, max_bytes=LIMIT)
    assert not copy.token_ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        copy.token_ids[0] = 1


def test_text_with_lone_surrogates_survives(make: Any) -> None:
    value = dataclasses.replace(make.completion(), text="half a pair: \ud83d")
    assert decode(encode(value), Completion, max_bytes=LIMIT).text == "half a pair: \ud83d"


def test_c120_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    with pytest.raises(Refused):
        decode(pickle.dumps(Bomb()), Group, max_bytes=LIMIT)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"\x93" + b"\x91" * 1012 + b"\x90\xa1x\x90",  # the schema is nested as deeply as msgpack reads
        b"\x93\x03" + b"\x91" * 1012 + b"\x90\x90",  # the type is
        b"\x93\x03\xa5Group" + b"\x91" * 1012 + b"\x90",  # the body is
    ],
)
def test_values_that_cannot_even_be_printed_are_refused(header: bytes) -> None:
    with pytest.raises(Refused, match=r"malformed|schema|type") as refusal:
        decode(len(header).to_bytes(4, "little") + header, Group, max_bytes=1 << 20)
    assert len(str(refusal.value)) < 500


def test_a_refusal_does_not_echo_what_it_refuses() -> None:
    header = msgpack.packb([SCHEMA_VERSION, "x" * 1_000_000, []])
    with pytest.raises(Refused, match="of type 'xxx") as refusal:
        decode(len(header).to_bytes(4, "little") + header, Group, max_bytes=1 << 30)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63, 2**64 - 1, 2**70])
def test_whole_numbers_that_a_double_cannot_hold_are_refused_at_both_ends(number: int) -> None:
    for value in (Frontier(base=number), Frontier(base=0, beyond=(1, number))):
        with pytest.raises(Refused, match=r"base|beyond|Frontier"):
            encode(value)
    for body in ([min(number, 2**64 - 1), []], [0, [1, min(number, 2**64 - 1)]]):
        with pytest.raises(Refused, match=r"2\*\*53"):
            decode(Writer().frame([SCHEMA_VERSION, "Frontier", body]), Frontier, max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward_parts", [("a", 1.0)]),
        ("reward", "1.5"),
        ("reward", True),
        ("reward", None),
        ("text", b"2"),
        ("token_ids", [1, 2]),
        ("token_ids", np.zeros(4, dtype=np.int64)),
    ],
)
def test_a_field_that_holds_something_else_is_not_sent(field: str, value: Any, make: Any) -> None:
    group = make.group(Lease(lease_id="l", prompt=make.prompt(0), attempt=1, incarnation=0))
    with pytest.raises(Refused, match=field):
        encode(_changed(group, **{field: value}))


@pytest.mark.parametrize("receivers", ["ab", {"a": 1}, None, iter(("a",))])
def test_only_tuples_and_lists_are_sent_as_tuples(receivers: Any) -> None:
    fields: dict[str, Any] = {"version": 0, "incarnation": 0, "attempt": 0, "epoch": 0, "store": ""}
    with pytest.raises(Refused, match="receivers"):
        encode(Publication(receivers=receivers, **fields))


def test_numbers_of_numpy_are_numbers(make: Any) -> None:
    group = make.group(Lease(lease_id="l", prompt=make.prompt(0), attempt=1, incarnation=0))
    sent = _changed(group, reward=np.float32(0.5), reward_parts={"a": np.int64(2)})
    got = decode(encode(sent), Group, max_bytes=LIMIT).completions[0]
    assert (got.reward, got.reward_parts) == (0.5, {"a": 2.0}) and type(got.reward) is float


def test_arrays_of_no_dimension_and_empty_ones_come_back_as_they_were(make: Any) -> None:
    group = make.group(Lease(lease_id="l", prompt=make.prompt(0), attempt=1, incarnation=0))
    sent = _changed(group, token_ids=np.array(7, dtype=">i4"), loss_mask=np.zeros(0, dtype=np.uint8))
    sent = dataclasses.replace(
        sent, prompt=dataclasses.replace(sent.prompt, token_ids=np.zeros((0, 3), dtype=np.int32))
    )
    got = decode(encode(sent), Group, max_bytes=LIMIT)
    assert got.completions[0].token_ids.shape == () and int(got.completions[0].token_ids) == 7
    assert got.prompt.token_ids.shape == (0, 3)
    assert not got.prompt.token_ids.flags.writeable and not got.completions[0].loss_mask.flags.writeable


@pytest.mark.parametrize("shape", [[0, 2**63], [2**63, 2**63], [2**62] * 8, [0] * 9, [2**63, 0, 2**63]])
def test_shapes_that_nothing_has_are_refused_or_empty(shape: list[int], make: Any) -> None:
    names = [field.name for field in dataclasses.fields(Prompt)]
    for body in (["<i4", shape], ["<i4", [shape]]):
        with contextlib.suppress(Refused):
            prompt = make.prompt(0)
            fields = [getattr(prompt, name) for name in names]
            fields[names.index("split")], fields[names.index("token_ids")] = "train", body
            got = decode(Writer().frame([SCHEMA_VERSION, "Prompt", fields]), Prompt, max_bytes=LIMIT)
            assert got.token_ids.size == 0


def _changed(group: Group, **fields: Any) -> Group:
    return dataclasses.replace(group, completions=(dataclasses.replace(group.completions[0], **fields),))


def test_tokens_of_another_shape_and_rewards_that_are_not_finite_are_refused(make: Any) -> None:
    group = make.group(Lease(lease_id="l", prompt=make.prompt(0), attempt=1, incarnation=0))
    refuse_malformed(group)
    with pytest.raises(Refused, match="tokens of shape"):
        refuse_malformed(_changed(group, token_ids=np.array(1, dtype=np.int32)))
    with pytest.raises(Refused, match="tokens of shape"):
        refuse_malformed(_changed(group, token_ids=group.completions[0].token_ids.reshape(1, -1)))
    with pytest.raises(Refused, match="not finite"):
        refuse_malformed(_changed(group, reward=float("nan")))
    with pytest.raises(Refused, match="not finite"):
        refuse_malformed(_changed(group, reward_parts={"a": float("inf")}))
    prompt = dataclasses.replace(group.prompt, token_ids=np.array(1, dtype=np.int32))
    with pytest.raises(Refused, match="prompt tokens of shape"):
        refuse_malformed(dataclasses.replace(group, prompt=prompt))
