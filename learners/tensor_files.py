"""Named tensors in safetensors files of bounded size with an index, as Hugging Face lays them out.

Written as a stream, so that no more than one file's worth is in memory; read back by name. Never pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from broker.errors import SlipstreamError
from weights_sync.staging import persistent_buffers

_FILE_BYTES = 2 << 30


class TensorsMissing(SlipstreamError):
    """Files do not hold the tensors they should; nothing is made up in their place."""


def write_tensors(
    directory: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], *, file_bytes: int = _FILE_BYTES
) -> None:
    """Writes ``<stem>.safetensors``, or numbered files with ``<stem>.safetensors.index.json``, into ``directory``."""
    places: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    count = size = total = 0

    def flush() -> None:
        nonlocal count, size
        count += 1
        name = f"{stem}-{count:05d}.safetensors"
        save_file(pending, directory / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(pending, name))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > file_bytes:
            flush()
        # A copy: the source may be a view of a buffer that the next tensor overwrites, or of a shared storage.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + nbytes, total + nbytes
    flush()
    if count == 1:
        (directory / f"{stem}-00001.safetensors").rename(directory / f"{stem}.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def read_tensors(directory: Path, stem: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that ``write_tensors`` wrote, one at a time. Raises TensorsMissing."""
    for path in _files(directory, stem):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)


def check_tensors(directory: Path, stem: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Compares names and shapes on disk with ``wanted``, without reading data. Raises TensorsMissing (C125, C128)."""
    found: dict[str, tuple[int, ...]] = {}
    for path in _files(directory, stem):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        elements = [sum(map(math.prod, shapes.values())) for shapes in (found, wanted)]
        raise TensorsMissing(
            f"{directory}/{stem}: {elements[0]} of {elements[1]} elements; {name} is {found.get(name, 'absent')} where "
            f"{wanted.get(name, 'nothing')} belongs, and {len(wrong) - 1} more differ"
        )


def load_into(module: nn.Module, directory: Path, stem: str) -> None:
    """Fills a whole module's parameters and persistent buffers, each tied tensor once. Raises TensorsMissing."""
    own: dict[str, Tensor] = dict(module.named_parameters()) | dict(persistent_buffers(module))
    check_tensors(directory, stem, {name: tuple(tensor.shape) for name, tensor in own.items()})
    with torch.no_grad():
        for name, value in read_tensors(directory, stem):
            own[name].copy_(value)


def _files(directory: Path, stem: str) -> list[Path]:
    index, whole = directory / f"{stem}.safetensors.index.json", directory / f"{stem}.safetensors"
    names = (
        set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else {whole.name}
    )
    files = [directory / name for name in sorted(names)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise TensorsMissing(f"{directory}: {', '.join(absent)} is missing")
    return files
