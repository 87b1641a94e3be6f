"""Messages to bytes and back: frames ``[schema, type, body]`` (broker/frame.py), driven by the dataclasses' type hints.

A dataclass travels as the list of its field values, an array as ``[dtype, shape]`` and raw bytes, a tuple of
dataclasses as the number of them and one column a field; a column of arrays is ``[dtype, shapes]`` and raw bytes, with
lengths for shapes where all have one dimension.
Decoding is strict: what is not exactly the declared type is refused, nothing is ever converted or executed.
Decoded arrays are read-only views on the received bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from enum import StrEnum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from broker.arrays import PLAIN, Malformed, read_array, read_column, ready, told, wire_dtype
from broker.errors import Refused
from broker.frame import Reader, Writer
from broker.messages import SCHEMA_VERSION
from broker.reasons import short

T = TypeVar("T")
Encoder = Callable[[Any, Writer], Any]
Decoder = Callable[[Any, Reader], Any]

_LARGEST = 1 << 53  # the whole numbers that a double holds exactly, which is what Lua counts with


def encode(value: Any, hint: Any = None) -> bytes:
    """The frame of a message. ``hint`` is its declared type, by default its class.

    Raises Refused when a field does not hold what its type hint declares.
    """
    hint = type(value) if hint is None else hint
    raw = Writer()
    try:
        return raw.frame([SCHEMA_VERSION, _name(hint), _encoder(hint)(value, raw)])
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"cannot encode {_name(hint)}: {error}") from error


def decode(frame: Sized, hint: type[T], *, max_bytes: int) -> T:
    """The message in a frame (bytes, or anything with the buffer protocol, which lives on in the arrays).

    Raises Refused: oversized, no frame, wrong schema, wrong type, or malformed.
    """
    if len(frame) > max_bytes:
        raise Refused(f"a frame of {len(frame)} bytes is over broker.max_frame_bytes = {max_bytes}")
    name = _name(cast(Any, hint))
    try:
        raw = Reader(frame)
    except (ValueError, TypeError) as error:
        raise Refused(f"malformed frame where {name} was expected: {error or type(error).__name__}") from error
    if not isinstance(raw.header, list) or len(raw.header) != 3:
        raise Refused(f"malformed frame where {name} was expected: not [schema, type, body]")
    schema, sent, body = raw.header
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise Refused(f"wire schema {told(schema)} where {SCHEMA_VERSION} is spoken: run one version on both sides")
    if sent != name:
        raise Refused(f"a frame of type {told(sent)} where {name} was expected")
    try:
        value = _decoder(cast(Any, hint))(body, raw)
        raw.end()
    except (ValueError, OverflowError, RecursionError) as error:
        raise Refused(f"malformed {name}: {short(str(error))}") from error
    return cast(T, value)


@functools.cache
def _name(hint: Any) -> str:
    return str(hint.__name__) if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


@functools.cache
def _encoder(hint: Any) -> Encoder:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass_encoder(cast(type, hint))
    if origin is tuple:
        return _rows_encoder(cast(type, args[0])) if dataclasses.is_dataclass(args[0]) else _tuple_encoder(args[0])
    if origin is dict:
        return _dict_encoder(*args)
    if origin in (Union, types.UnionType):
        inner = _encoder(_optional(args))
        return lambda value, raw: None if value is None else inner(value, raw)
    if origin is np.ndarray:
        return _array_encoder(wire_dtype(args))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value, raw: hint(value).value
    if hint is int:
        return lambda value, raw: _whole(operator.index(value))
    if hint is float:
        return lambda value, raw: _real(value)
    return lambda value, raw: _expect(value, hint)


@functools.cache
def _decoder(hint: Any) -> Decoder:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass_decoder(cast(type, hint))
    if origin is tuple:
        return _rows_decoder(cast(type, args[0])) if dataclasses.is_dataclass(args[0]) else _tuple_decoder(args[0])
    if origin is dict:
        return _dict_decoder(*args)
    if origin in (Union, types.UnionType):
        inner = _decoder(_optional(args))
        return lambda value, raw: None if value is None else inner(value, raw)
    if origin is np.ndarray:
        dtype = wire_dtype(args)
        return lambda value, raw: read_array(value, dtype, raw)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value, raw: _member(hint, value)
    if hint is int:
        return lambda value, raw: _whole(_expect(value, int))
    return lambda value, raw: _expect(value, hint)


def _expect(value: Any, kind: Any) -> Any:
    kind = type(None) if kind is None else kind
    if type(value) is not kind:
        raise Malformed(f"{type(value).__name__} where {kind.__name__} is declared")
    return value


def _whole(value: int) -> int:
    if not -_LARGEST <= value <= _LARGEST:
        raise Malformed("a whole number beyond 2**53")
    return value


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise Malformed(f"{type(value).__name__} where float is declared")
    return float(value)


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, tuple | list):
        raise Malformed(f"{type(value).__name__} where a tuple is declared")
    return value


def _placed(place: str, error: Exception) -> Malformed:
    """The complaint with the place prefixed, so that the text names the field."""
    return Malformed(f"{place}{'' if str(error).startswith(('.', '[')) else ': '}{error}")


def _only(kind: Any, values: Collection[Any]) -> bool:
    """Whether these are plain values, all of exactly this type: then they travel as they are."""
    if kind not in PLAIN or not {kind}.issuperset(map(type, values)):
        return False
    return kind is not int or (max(values, default=0) <= _LARGEST and min(values, default=0) >= -_LARGEST)


def _optional(args: tuple[Any, ...]) -> Any:
    (inner,) = (arg for arg in args if arg is not type(None))
    return inner


def _member(kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(_expect(value, str))
    except ValueError as error:
        raise Malformed(str(error)) from error


# -- containers ------------------------------------------------------------------------------------------------
def _each(convert: Callable[[Any, Any], Any], values: Iterable[Any], raw: Any, after: str = "") -> list[Any]:
    converted: list[Any] = []
    try:
        for value in values:
            converted.append(convert(value, raw))
    except (TypeError, ValueError) as error:
        raise _placed(f"[{len(converted)}]{after}", error) from error
    return converted


def _tuple_encoder(kind: Any) -> Encoder:
    each = _encoder(kind)
    return lambda value, raw: list(value) if _only(kind, _sequence(value)) else _each(each, value, raw)


def _tuple_decoder(kind: Any) -> Decoder:
    each = _decoder(kind)

    def convert(value: Any, raw: Reader) -> tuple[Any, ...]:
        return tuple(value if type(value) is list and _only(kind, value) else _each(each, _expect(value, list), raw))

    return convert


def _dict_encoder(of_key: Any, of_value: Any) -> Encoder:
    key, each = _encoder(of_key), _encoder(of_value)

    def convert(value: Any, raw: Writer) -> dict[Any, Any]:
        if _only(of_key, _expect(value, dict)) and _only(of_value, value.values()):
            return cast(dict[Any, Any], value)
        return {key(k, raw): each(v, raw) for k, v in value.items()}

    return convert


def _dict_decoder(of_key: Any, of_value: Any) -> Decoder:
    key, each = _decoder(of_key), _decoder(of_value)

    def convert(value: Any, raw: Reader) -> dict[Any, Any]:
        if _only(of_key, _expect(value, dict)) and _only(of_value, value.values()):
            return cast(dict[Any, Any], value)
        found: dict[Any, Any] = {}
        for k, v in value.items():
            try:
                found[key(k, raw)] = each(v, raw)
            except (TypeError, ValueError) as error:
                raise _placed(f"[{told(k)}]", error) from error
        return found

    return convert


# -- dataclasses -----------------------------------------------------------------------------------------------
def _fields(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _dataclass_encoder(kind: type) -> Encoder:
    plan = [(name, _encoder(hint)) for name, hint in _fields(kind)]

    def convert(value: Any, raw: Writer) -> list[Any]:
        _expect(value, kind)
        converted, name = [], ""
        try:
            for name, each in plan:
                converted.append(each(getattr(value, name), raw))
        except (TypeError, ValueError) as error:
            raise _placed(f".{name}", error) from error
        return converted

    return convert


def _dataclass_decoder(kind: type) -> Decoder:
    plan = [(name, _decoder(hint)) for name, hint in _fields(kind)]

    def convert(value: Any, raw: Reader) -> Any:
        if len(_expect(value, list)) != len(plan):
            raise Malformed(f"{len(value)} fields where {kind.__name__} has {len(plan)}")
        fields, name = {}, ""
        try:
            for (name, each), one in zip(plan, value, strict=True):
                fields[name] = each(one, raw)
        except (TypeError, ValueError) as error:
            raise _placed(f".{name}", error) from error
        return _build(kind, fields)

    return convert


def _rows_encoder(kind: type) -> Encoder:
    plan = [(operator.attrgetter(name), _column_encoder(name, hint)) for name, hint in _fields(kind)]

    def convert(value: Any, raw: Writer) -> list[Any]:
        if not set(map(type, _sequence(value))) <= {kind}:
            i, row = next((i, row) for i, row in enumerate(value) if type(row) is not kind)
            raise Malformed(f"[{i}]: {type(row).__name__} where {kind.__name__} is declared")
        return [len(value), *(column(list(map(get, value)), raw) for get, column in plan)]

    return convert


def _rows_decoder(kind: type) -> Decoder:
    names, columns = zip(*((name, _column_decoder(name, hint)) for name, hint in _fields(kind)), strict=True)

    def convert(value: Any, raw: Reader) -> tuple[Any, ...]:
        if len(_expect(value, list)) != len(names) + 1:
            raise Malformed(f"{len(value) - 1} columns where {kind.__name__} has {len(names)} fields")
        size = _expect(value[0], int)
        read = [column(one, size, raw) for column, one in zip(columns, value[1:], strict=True)]
        return tuple(_build(kind, zip(names, row, strict=True)) for row in zip(*read, strict=True))

    return convert


def _build(kind: type, fields: Any) -> Any:
    """As ``kind(**fields)``, in a fifth of the time: messages have no code of their own to run when they are made."""
    made: Any = object.__new__(kind)
    made.__dict__.update(fields)
    return made


# -- columns and arrays ----------------------------------------------------------------------------------------
def _column_encoder(name: str, hint: Any) -> Callable[[list[Any], Writer], Any]:
    if get_origin(hint) is np.ndarray:
        dtype = wire_dtype(get_args(hint))
        text = dtype.str

        def pack(arrays: list[Any], raw: Writer) -> list[Any]:
            rows = [ready(dtype, one, f"[{i}].{name}") for i, one in enumerate(arrays)]
            lengths = [one.size for one in rows]
            raw.add(rows, sum(lengths) * dtype.itemsize)
            flat = {one.ndim for one in rows} <= {1}
            return [text, lengths if flat else [one.shape for one in rows]]

        return pack
    each, plain = _encoder(hint), _plain_column(hint)

    def write(values: list[Any], raw: Writer) -> list[Any]:
        return values if plain(values) else _each(each, values, raw, f".{name}")

    return write


def _column_decoder(name: str, hint: Any) -> Callable[[Any, int, Reader], Any]:
    if get_origin(hint) is np.ndarray:
        dtype = wire_dtype(get_args(hint))

        def split(value: Any, size: int, raw: Reader) -> list[Any]:
            try:
                return read_column(value, size, dtype, raw)
            except ValueError as error:
                raise _placed(f".{name}", error) from error

        return split
    each, plain = _decoder(hint), _plain_column(hint)

    def read(value: Any, size: int, raw: Reader) -> list[Any]:
        if type(value) is not list or len(value) != size:
            raise Malformed(f".{name}: not a column of {size}")
        return value if plain(value) else _each(each, value, raw, f".{name}")

    return read


@functools.cache
def _plain_column(hint: Any) -> Callable[[list[Any]], bool]:
    """Says whether a column travels as it is: plain values, or dictionaries of them."""
    if get_origin(hint) is not dict:
        return functools.partial(_only, hint)
    key, value = get_args(hint)
    flat = itertools.chain.from_iterable

    def plain(values: list[Any]) -> bool:
        if not set(map(type, values)) <= {dict}:
            return False
        return _only(key, list(flat(values))) and _only(value, list(flat(map(dict.values, values))))

    return plain


def _array_encoder(dtype: np.dtype[Any]) -> Encoder:
    def convert(value: Any, raw: Writer) -> list[Any]:
        array = ready(dtype, value)
        raw.add([array], array.nbytes)
        return [dtype.str, list(value.shape)]

    return convert
