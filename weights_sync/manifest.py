"""The manifest of a publication: what the payload holds, planned as a pure function over names and shapes.

    declared specs --plan--> entries with offsets --fill, digest--> Manifest --encode--> wire --decode--> Manifest

The payload is one flat run of bytes; every tensor sits in a slot that starts at a multiple of ALIGNMENT, so that a
view of any element type is legal. Storages that share memory are sent once and named in ``tied``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import msgpack
import xxhash

from weights_sync.encoding import GAP_WIDTHS, Encoding
from weights_sync.errors import LayoutRefused, SyncFailed

SCHEMA = 3
ALIGNMENT = 64  # bytes; a cache line, and more than any element needs
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor as a learner rank declares it: its full (never a shard's) shape, and its own element type.

    Attributes:
        start, count: which of its elements, in row-major order, this rank sends; -1: all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    buffer: bool = False
    start: int = 0
    count: int = -1


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the payload, or the part of it that one learner rank holds.

    Attributes:
        shape: of the whole tensor.
        dtype: element type on the wire.
        offset: of the slot in the payload, in bytes.
        nbytes: of the elements themselves, without the slot's padding.
        start: the first element, in row-major order.
        digest: xxh3_128 of the wire bytes, in hex; empty until the bytes are there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    digest: str = ""
    start: int = 0

    @property
    def count(self) -> int:
        """Elements."""
        return self.nbytes // ITEM_BYTES[self.dtype]

    @property
    def whole(self) -> bool:
        """Whether these are all elements of the tensor."""
        return self.count == math.prod(self.shape)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape in staging: the tensor's own, or flat for a part of it."""
        return self.shape if self.whole else (self.count,)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one learner rank sends of a publication; of several ranks together it is the version.

    Attributes:
        part: the rank that sends it, of ``parts`` in all.
        base: version that the payload is an update of; -1: none, every tensor is whole.
        updates: how each entry travels, in the entries' order; empty without a base.
        tied: alias -> name of the entry that shares its storage; aliases are never sent.
        buffers: names of entries that are buffers; buffers not named here are left alone on the receiver.
    """

    version: int
    incarnation: int
    entries: tuple[TensorEntry, ...]
    base: int = -1
    updates: tuple[Encoding, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of a whole version in staging, padding included."""
        return sum(_slot(entry.nbytes) for entry in self.entries)

    @property
    def wire_bytes(self) -> int:
        """Bytes that are sent: of a whole version as it is in staging, or of the updates."""
        return self.payload_bytes if self.base < 0 else sum(update.nbytes for update in self.updates)

    def layout(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """What must not change between two versions of one run: name, shape and wire type of every tensor."""
        return tuple((entry.name, entry.shape, entry.dtype) for entry in self.entries)


def plan(
    specs: Sequence[TensorSpec],
    *,
    wire_dtype: str,
    keep_fp32: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
) -> tuple[TensorEntry, ...]:
    """Lays the declared tensors out in their order, floating ones in ``wire_dtype``, tied aliases left out.

    ``keep_fp32``: patterns (fnmatch) of names that travel in float32 all the same.

    Raises LayoutRefused for an empty tensor (a shard that was not gathered), a name given twice, an unknown type,
    or an alias of a tensor that is not sent.
    """
    tied = tied or {}
    entries: list[TensorEntry] = []
    offset = 0
    for spec in specs:
        if spec.name in tied:
            continue
        dtype = wire_dtype if spec.dtype in _FLOATS else spec.dtype
        if spec.dtype in _FLOATS and any(fnmatchcase(spec.name, pattern) for pattern in keep_fp32):
            dtype = "float32"
        if dtype not in ITEM_BYTES:
            raise LayoutRefused(f"{spec.name}: element type {dtype!r} cannot be sent")
        elements = math.prod(spec.shape) if spec.count < 0 else spec.count
        if elements == 0:
            raise LayoutRefused(f"{spec.name}: declared shape {spec.shape} is empty; declare the full shape")
        nbytes = elements * ITEM_BYTES[dtype]
        entries.append(
            TensorEntry(name=spec.name, shape=spec.shape, dtype=dtype, offset=offset, nbytes=nbytes, start=spec.start)
        )
        offset += _slot(nbytes)
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LayoutRefused(f"declared twice: {', '.join(twice)}")
    if lost := sorted(alias for alias, target in tied.items() if target not in names):
        raise LayoutRefused(f"tied to a tensor that is not sent: {', '.join(lost)}")
    return tuple(entries)


def whole_entries(first: Manifest) -> tuple[TensorEntry, ...]:
    """Where every tensor of a version lies whole, from the manifest of part 0, which has some of each."""
    entries: list[TensorEntry] = []
    offset = 0
    for entry in first.entries:
        nbytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        entries.append(TensorEntry(name=entry.name, shape=entry.shape, dtype=entry.dtype, offset=offset, nbytes=nbytes))
        offset += _slot(nbytes)
    return tuple(entries)


def check_parts(parts: Sequence[Manifest]) -> None:
    """Raises SyncFailed unless the parts are of one version and every element of every tensor is in just one."""
    first = parts[0]
    for number, part in enumerate(parts):
        same = (part.version, part.incarnation, part.base) == (first.version, first.incarnation, first.base)
        if not same or (part.part, part.parts) != (number, len(parts)):
            raise SyncFailed(
                f"part {part.part} of {part.parts} of version {part.version} came as part {number} of {len(parts)} of "
                f"version {first.version}"
            )
    ends = {entry.name: 0 for entry in first.entries}
    for part in parts:
        for entry in part.entries:
            if ends.get(entry.name) != entry.start:
                raise SyncFailed(f"{entry.name}: part {part.part} begins at {entry.start}, not {ends.get(entry.name)}")
            ends[entry.name] += entry.count
    short = [entry.name for entry in first.entries if ends[entry.name] != math.prod(entry.shape)]
    if short:
        raise SyncFailed(f"version {first.version} lacks elements of {_listed(short)}")


def check_shape(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raises LayoutRefused unless ``shape`` is the declared one (outside of ZeRO-3's own calls it is (0,))."""
    if shape != entry.held_shape:
        raise LayoutRefused(f"{entry.name}: got shape {shape}, declared {entry.held_shape}; gather the parameter first")


def check_names(*, wanted: Iterable[str], got: Iterable[str], who: str) -> None:
    """Raises LayoutRefused that lists every unknown and every missing name; matching nothing is no special case."""
    wanted, got = set(wanted), set(got)
    unknown, missing = sorted(got - wanted), sorted(wanted - got)
    if unknown or missing:
        parts = [f"unknown: {_listed(unknown)}"] if unknown else []
        parts += [f"missing: {_listed(missing)}"] if missing else []
        raise LayoutRefused(f"tensor names do not fit {who}; {'; '.join(parts)}")


def digest(data: memoryview) -> str:
    """xxh3_128 of ``data`` in hex: 32 characters."""
    return xxhash.xxh3_128_hexdigest(data)


def with_digests(manifest: Manifest, digest_of: Callable[[TensorEntry], str]) -> Manifest:
    """The manifest with every entry's digest filled in."""
    return replace(manifest, entries=tuple(replace(entry, digest=digest_of(entry)) for entry in manifest.entries))


def bucket_spans(total_bytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) byte ranges of at most ``bucket_bytes`` that cover the payload."""
    for start in range(0, total_bytes, bucket_bytes):
        yield start, min(start + bucket_bytes, total_bytes)


def encode(manifest: Manifest) -> bytes:
    """The manifest as msgpack bytes."""
    rows = [[e.name, list(e.shape), e.dtype, e.offset, e.nbytes, e.digest, e.start] for e in manifest.entries]
    document = {
        "schema": SCHEMA,
        "version": manifest.version,
        "incarnation": manifest.incarnation,
        "entries": rows,
        "base": manifest.base,
        "updates": [[update.kind, update.count, update.gap_bytes, update.nbytes] for update in manifest.updates],
        "tied": dict(manifest.tied),
        "buffers": list(manifest.buffers),
        "part": manifest.part,
        "parts": manifest.parts,
    }
    packed: bytes = msgpack.packb(document)
    return packed


def decode(data: bytes) -> Manifest:
    """Raises SyncFailed for anything that ``encode`` cannot have written."""
    try:
        document = msgpack.unpackb(data, strict_map_key=True)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}, expected {SCHEMA}")
        manifest = Manifest(
            version=_typed(document["version"], int),
            incarnation=_typed(document["incarnation"], int),
            entries=tuple(_entry(row) for row in document["entries"]),
            base=_typed(document["base"], int),
            updates=tuple(_update(row) for row in document["updates"]),
            tied={_typed(k, str): _typed(v, str) for k, v in document["tied"].items()},
            buffers=tuple(_typed(name, str) for name in document["buffers"]),
            part=_typed(document["part"], int),
            parts=_typed(document["parts"], int),
        )
        _consistent(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise SyncFailed(f"malformed manifest: {error}") from error
    return manifest


def _entry(row: list[Any]) -> TensorEntry:
    name, shape, dtype, offset, nbytes, checksum, start = row
    entry = TensorEntry(
        name=_typed(name, str),
        shape=tuple(_typed(size, int) for size in shape),
        dtype=_typed(dtype, str),
        offset=_typed(offset, int),
        nbytes=_typed(nbytes, int),
        digest=_typed(checksum, str),
        start=_typed(start, int),
    )
    end = entry.start + entry.count
    fits = entry.nbytes == entry.count * ITEM_BYTES[entry.dtype] and 0 <= entry.start < end <= math.prod(entry.shape)
    if any(size <= 0 for size in entry.shape) or not fits:
        raise ValueError(
            f"{entry.name}: {entry.nbytes} bytes from element {entry.start} do not fit {entry.shape} of {entry.dtype}"
        )
    if len(bytes.fromhex(entry.digest)) != 16:
        raise ValueError(f"{entry.name}: no digest")
    return entry


def _update(row: list[Any]) -> Encoding:
    kind, count, gap_bytes, nbytes = row
    update = Encoding(
        kind=_typed(kind, str), count=_typed(count, int), gap_bytes=_typed(gap_bytes, int), nbytes=_typed(nbytes, int)
    )
    fits = update.gap_bytes in GAP_WIDTHS if update.kind == "sparse" else (update.kind, gap_bytes) == ("whole", 0)
    if not fits or update.count < 0 or update.nbytes < 0:
        raise ValueError(f"no such update: {row!r}")
    return update


def _consistent(manifest: Manifest) -> None:
    if len(manifest.updates) != (len(manifest.entries) if manifest.base >= 0 else 0):
        raise ValueError(f"{len(manifest.updates)} updates of {len(manifest.entries)} entries since {manifest.base}")
    for entry, update in zip(manifest.entries, manifest.updates, strict=False):
        elements, item_bytes = entry.count, ITEM_BYTES[entry.dtype]
        if update.count > elements or update.nbytes != update.count * (item_bytes + update.gap_bytes):
            raise ValueError(f"{entry.name}: {update.nbytes} bytes for {update.count} changes of {elements} elements")
        if update.kind == "whole" and update.count != elements:
            raise ValueError(f"{entry.name}: {update.count} elements where all {elements} were announced")
    offset = 0
    for entry in manifest.entries:
        if entry.offset != offset:
            raise ValueError(f"{entry.name}: slot at {entry.offset}, expected {offset}")
        offset += _slot(entry.nbytes)
    if not 0 <= manifest.part < manifest.parts:
        raise ValueError(f"part {manifest.part} of {manifest.parts}")
    if manifest.parts == 1 and not all(entry.whole for entry in manifest.entries):
        raise ValueError("the only part lacks elements")
    names = {entry.name for entry in manifest.entries}
    if len(names) != len(manifest.entries):
        raise ValueError("a name occurs twice")
    if not names.issuperset(manifest.buffers) or not names.issuperset(manifest.tied.values()):
        raise ValueError("a buffer or a tied name is not among the entries")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


def _slot(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _listed(names: list[str], limit: int = 20) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
