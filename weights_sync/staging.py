"""Staging: one flat buffer that holds a whole version in wire bytes, with a view per tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.manifest import (
    Manifest,
    TensorEntry,
    TensorSpec,
    check_names,
    check_shape,
    digest,
    plan,
    with_digests,
)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What one learner rank has to send: every storage once, what is tied to it, and persistent buffers.

    Attributes:
        part: the rank, of ``parts`` in all; buffers are in part 0 alone.
    """

    specs: tuple[TensorSpec, ...]
    tied: Mapping[str, str]
    part: int = 0
    parts: int = 1

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the persistent buffers among the specs."""
        return tuple(spec.name for spec in self.specs if spec.buffer)


def declare(model: nn.Module, *, part: int = 0, parts: int = 1) -> Declaration:
    """Reads names and full shapes off a model; parameters partitioned by ZeRO-3 carry theirs in ``ds_shape``.

    Whether two names are tied is decided by identity of the parameter, as the model's own config made it, never by
    comparing values. Buffers with ``persistent=False`` are computed by each engine and left alone.

    ``part``, ``parts``: of so many learner ranks each declares its own elements, cut as ZeRO-3 cuts them.
    """
    specs: list[TensorSpec] = []
    owner: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owner:
            tied[name] = owner[id(parameter)]
            continue
        owner[id(parameter)] = name
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        start, count = shard_of(math.prod(shape), part, parts)
        if count or parts == 1:  # an empty tensor is for ``plan`` to refuse
            dtype = dtype_name(parameter.dtype)
            specs.append(TensorSpec(name=name, shape=shape, dtype=dtype, start=start, count=count))
    for name, buffer in persistent_buffers(model) if part == 0 else ():
        specs.append(TensorSpec(name=name, shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype), buffer=True))
    return Declaration(specs=tuple(specs), tied=tied, part=part, parts=parts)


def shard_of(elements: int, part: int, parts: int) -> tuple[int, int]:
    """(start, count) of a rank's elements of a tensor, as ZeRO-3 cuts it: equal shards, the last ones cut short."""
    size = -(-elements // parts)
    start = min(part * size, elements)
    return start, min(size, elements - start)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a checkpoint of the model would hold."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


class Staging:
    """A version's bytes. ``views`` maps each name to its tensor inside ``buffer`` (uint8, [payload_bytes])."""

    def __init__(self, entries: Sequence[TensorEntry], *, device: str = "cpu", buffer: Tensor | None = None) -> None:
        self.entries = tuple(entries)
        total = Manifest(version=0, incarnation=0, entries=self.entries).payload_bytes
        self.buffer = torch.zeros(total, dtype=torch.uint8, device=device) if buffer is None else buffer
        self.views = {entry.name: self._slot(entry).view(torch_dtype(entry.dtype)) for entry in self.entries}
        self.views = {entry.name: self.views[entry.name].view(entry.held_shape) for entry in self.entries}

    @classmethod
    def planned(
        cls, declaration: Declaration, *, wire_dtype: str, device: str = "cpu", keep_fp32: Sequence[str] = ()
    ) -> Staging:
        """Staging for everything a model declares."""
        entries = plan(declaration.specs, wire_dtype=wire_dtype, keep_fp32=keep_fp32, tied=declaration.tied)
        return cls(entries, device=device)

    def empty_like(self) -> Staging:
        """Another staging of the same layout."""
        return Staging(self.entries, device=str(self.buffer.device))

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies a complete version in, converting to the wire type; a tied tensor comes once, under its first name.

        Raises LayoutRefused for an unknown or missing name and for anything but the declared shape.
        """
        by_name = {entry.name: entry for entry in self.entries}
        seen: list[str] = []
        with torch.no_grad():
            for name, tensor in tensors:
                seen.append(name)
                if name in by_name:
                    check_shape(by_name[name], tuple(tensor.shape))
                    self.views[name].copy_(tensor)
        check_names(wanted=by_name, got=seen, who="what the learner declared")

    def refuse_nonfinite(self, version: int) -> None:
        """Raises LayoutRefused naming the tensors that hold a NaN or an infinity: no engine is to sample with them."""
        wrong = [
            name for name, view in self.views.items() if view.is_floating_point() and not bool(view.isfinite().all())
        ]
        if wrong:
            raise LayoutRefused(f"version {version} is not sent: {_listed(wrong)} not finite")

    def digest_of(self, entry: TensorEntry) -> str:
        """Digest of the entry's wire bytes as they are in the buffer."""
        return digest(self._slot(entry).cpu().numpy().data)

    def segment(self, entry: TensorEntry) -> Tensor:
        """Flat view of the elements that an entry of one part names, in staging of whole tensors."""
        return self.views[entry.name].view(-1)[entry.start : entry.start + entry.count]

    def sealed(self, *, version: int, incarnation: int, declaration: Declaration) -> Manifest:
        """The manifest of what is staged, digests included."""
        manifest = Manifest(
            version=version,
            incarnation=incarnation,
            entries=self.entries,
            tied=declaration.tied,
            buffers=declaration.buffers,
            part=declaration.part,
            parts=declaration.parts,
        )
        return with_digests(manifest, self.digest_of)

    def verify(self, manifest: Manifest) -> None:
        """Raises SyncFailed naming the tensors whose bytes are not what the manifest says."""
        wrong = [
            entry.name
            for entry in manifest.entries
            if digest(self.segment(entry).view(torch.uint8).cpu().numpy().data) != entry.digest
        ]
        if wrong:
            raise SyncFailed(f"version {manifest.version}: bytes of {', '.join(wrong[:5])} differ from their digest")

    def _slot(self, entry: TensorEntry) -> Tensor:
        return self.buffer[entry.offset : entry.offset + entry.nbytes]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> torch.float32; the manifest's validation has bounded the names."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")
