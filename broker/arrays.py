"""Arrays in frames: ``[dtype, shape]`` in the header and raw bytes behind it, views of these when they are read.

Shapes come from outside: sizes that are none, more dimensions than anything has, or more elements than there are bytes
are refused before anything is allocated.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import numpy as np

from broker.frame import Reader

PLAIN = (str, int, float, bool)
_TOLD_CHARACTERS = 64
_DIMENSIONS = 8  # of an array; ours have two at most


class Malformed(ValueError):
    """A value is not of the declared type; the text says where and why."""


def told(value: Any) -> str:
    """A foreign value for an error's text: numbers and the beginning of strings, else its type; it may be anything."""
    return repr(value)[:_TOLD_CHARACTERS] if type(value) in PLAIN else type(value).__name__


def wire_dtype(args: tuple[Any, ...]) -> np.dtype[Any]:
    """The little-endian type of the elements, from the arguments of an ``NDArray`` type hint."""
    declared: np.dtype[Any] = np.dtype(get_args(args[1])[0])
    return declared.newbyteorder("<")


def ready(dtype: np.dtype[Any], value: Any, place: str = "") -> Any:
    """The array as it can be copied into a frame. Raises Malformed for anything but an array of this type."""
    if type(value) is np.ndarray and value.dtype == dtype:
        return value
    if not isinstance(value, np.ndarray) or value.dtype.newbyteorder("<") != dtype:
        found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise Malformed(f"{place}{': ' if place else ''}{found} where an array of {dtype.name} is declared")
    return np.asarray(value, dtype=dtype, order="C")


def read_array(value: Any, dtype: np.dtype[Any], raw: Reader) -> Any:
    """One array, from ``[dtype, shape]``."""
    shape = _declared(value, dtype, "shape")
    (length,) = _lengths([shape])
    return raw.take(dtype, length).reshape(shape)


def read_column(value: Any, size: int, dtype: np.dtype[Any], raw: Reader) -> list[Any]:
    """``size`` arrays, from ``[dtype, shapes]``, with lengths for shapes where all have one dimension."""
    shapes = _declared(value, dtype, "shapes")
    if type(shapes) is not list or len(shapes) != size:
        raise Malformed(f"not {size} shapes")
    lined_up = set(map(type, shapes)) <= {int} and min(shapes, default=0) >= 0
    ends = [0, *itertools.accumulate(shapes if lined_up else _lengths(shapes))]
    flat = raw.take(dtype, ends[-1])
    parts = [flat[start:end] for start, end in itertools.pairwise(ends)]
    return parts if lined_up else [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _declared(value: Any, dtype: np.dtype[Any], what: str) -> Any:
    if type(value) is not list or len(value) != 2:
        raise Malformed(f"not [dtype, {what}]")
    if value[0] != dtype.str:
        raise Malformed(f"dtype {told(value[0])} where {dtype.str!r} is declared")
    return value[1]


def _lengths(shapes: list[Any]) -> list[int]:
    if set(map(type, shapes)) <= {list} and max(map(len, shapes), default=0) <= _DIMENSIONS:
        sizes = list(itertools.chain.from_iterable(shapes))
        if set(map(type, sizes)) <= {int} and min(sizes, default=0) >= 0:
            return list(map(math.prod, shapes))
    raise Malformed(f"a shape is not a list of sizes, {_DIMENSIONS} at most")
