"""What a save makes the training wait for: tensors of all ranks, copied into rank 0's memory or written at once.

    collective stream of (name, whole tensor) ─┬─ background: copy in CPU memory ─► written beside the next steps
                                               └─ else, or too little memory: written as it comes

Tensors are saved whole, so that any number of ranks at any ZeRO stage can load them (C71).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from torch import Tensor

from learners.tensor_files import check_tensors, write_tensors

log = logging.getLogger(__name__)

_ELEMENT_BYTES = 4
_SPARE = 1.25  # of the copy: the file that is being written is copied once more


@dataclass(frozen=True)
class Stream:
    """``tensors``: collective; (name, whole tensor) on rank 0, nothing elsewhere. ``shapes``: what will come."""

    tensors: Iterator[tuple[str, Tensor]]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def bytes(self) -> int:
        """Of everything that will come, in float32."""
        return _ELEMENT_BYTES * sum(map(math.prod, self.shapes.values()))


def capture(streams: Mapping[str, Stream], directory: Path, *, rank: int, background: bool) -> Callable[[], None]:
    """Collective. Goes through every stream; what is returned leaves each in ``directory`` under its stem, read back
    for its shapes (C125, C128). On other ranks than 0 that is nothing. Raises TensorsMissing, there or here.
    """
    if rank != 0:
        for stream in streams.values():
            for _ in stream.tensors:
                pass
        return lambda: None
    copied = background and _fits(sum(stream.bytes for stream in streams.values()))
    kept: dict[str, dict[str, Tensor]] = {}
    for stem, stream in streams.items():
        if copied:
            kept[stem] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in stream.tensors}
        else:
            _write(directory, stem, stream, stream.tensors)

    def write() -> None:
        for stem, tensors in kept.items():
            _write(directory, stem, streams[stem], ((name, tensors.pop(name)) for name in list(tensors)))

    return write


def _write(directory: Path, stem: str, stream: Stream, tensors: Iterator[tuple[str, Tensor]]) -> None:
    if stream.shapes:
        write_tensors(directory, stem, tensors)
        check_tensors(directory, stem, stream.shapes)


def _fits(size: int) -> bool:
    free = psutil.virtual_memory().available
    if _SPARE * size > free:
        log.warning(
            "a copy of the checkpoint would take %.1f GiB of the %.1f GiB of memory that are free: the training waits "
            "until it is written (learner.checkpoint.background)", size / 2**30, free / 2**30,
        )  # fmt: skip
        return False
    return True
