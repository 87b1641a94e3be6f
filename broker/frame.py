"""A frame: a msgpack header, and behind it the raw bytes of its arrays, each copied once when written, never when read.

    [header's size, 4 bytes little-endian][header][zeros up to a multiple of 8][raw][zeros][raw]…

Raw bytes lie in the order in which the header's converter asks for them; a frame has nothing that nobody asked for.
"""

from __future__ import annotations

import struct
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 8
_SIZE = struct.Struct("<I")
_ZEROS = bytes(ALIGNMENT)
_HEADER_BUFFER = 2048  # bytes; msgpack's own default of 256 KiB is mapped anew for every message

# Sampled text may hold lone surrogates; they must survive the trip instead of failing it.
_UNICODE = "surrogatepass"


class Writer:
    """Collects raw bytes (anything that has the buffer protocol) until the header is known."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def add(self, parts: list[Any], size: int) -> None:
        """One stretch of raw bytes, ``size`` in all, from parts that are joined."""
        if size:
            self._parts += parts
            if padding := -size % ALIGNMENT:
                self._parts.append(_ZEROS[:padding])

    def frame(self, header: Any) -> bytes:
        """The finished frame. Raises TypeError, ValueError, OverflowError for what msgpack cannot say."""
        packed = cast(bytes, msgpack.packb(header, unicode_errors=_UNICODE, buf_size=_HEADER_BUFFER))
        size = _SIZE.pack(len(packed))
        if not self._parts:
            return size + packed
        padding = _ZEROS[: -(_SIZE.size + len(packed)) % ALIGNMENT]
        try:
            return b"".join([size, packed, padding, *self._parts])
        except (TypeError, ValueError, BufferError):  # strided arrays
            return b"".join([size, packed, padding, *map(_contiguous, self._parts)])


def _contiguous(part: Any) -> Any:
    return np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part


class Reader:
    """Hands out raw bytes in order, as read-only views."""

    def __init__(self, frame: Any) -> None:
        """Raises ValueError when it is no frame."""
        self._view = memoryview(frame).toreadonly()
        if len(self._view) < _SIZE.size:
            raise ValueError("too short")
        (size,) = _SIZE.unpack_from(self._view)
        end = _SIZE.size + size
        if end > len(self._view):
            raise ValueError(f"a header of {size} bytes in {len(self._view)}")
        self.header: Any = msgpack.unpackb(self._view[_SIZE.size : end], unicode_errors=_UNICODE)
        self._at = end if end == len(self._view) else end + -end % ALIGNMENT

    def take(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """The next ``count`` elements. Raises ValueError when there are not as many."""
        if not count:
            return np.frombuffer(b"", dtype=dtype)
        size = count * dtype.itemsize
        if self._at + size > len(self._view):
            raise ValueError(f"{max(0, len(self._view) - self._at)} raw bytes left where {size} are declared")
        taken = np.frombuffer(self._view, dtype=dtype, count=count, offset=self._at)
        self._at += size + -size % ALIGNMENT
        return taken

    def end(self) -> None:
        """Raises ValueError when there is more than was taken."""
        if self._at != len(self._view):
            raise ValueError(f"{len(self._view) - self._at} raw bytes that nothing declares")
