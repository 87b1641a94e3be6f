"""The part of weight sync that lives in vLLM's worker processes (entry point ``vllm.general_plugins``).

    stage: init_transfer_engine(publication) -> Receiver's thread, returns at once -> notice over ZeroMQ when settled
    swap:  update_weights(attempt) -> model.load_weights(views of the staging buffer), in place

vLLM on CPU packs linear weights into oneDNN's own format at load and leaves an empty parameter behind; later loads
then fail or, for a tied head, go stale without a word. So packing is switched off before the model is loaded: live
weights stay plain tensors that are loaded in place and can be compared with what was sent.
weights_sync/vllm_prefix_cache.py is the part that lives beside vLLM's scheduler.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgpack
import torch
import zmq
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from broker.connect import Access
from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.manifest import Manifest, check_names, decode, encode
from weights_sync.receiver import Receiver, Staged
from weights_sync.staging import Staging, persistent_buffers
from weights_sync.vllm_prefix_cache import keep_versions_apart

BACKEND = "slipstream"
_NOTICE_LINGER_MS = 5000


def register() -> None:
    """Called by vLLM in each of its processes, before a model is loaded."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SlipstreamTransfer")
    parent = multiprocessing.parent_process()
    if parent is not None:
        keep_versions_apart()
        # vLLM's core outlives a SIGKILL of its parent and would keep the device's memory.
        threading.Thread(target=_die_with, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class StageRequest(WeightTransferInitInfo):  # type: ignore[misc]
    """Receive this publication. Plain values: it crosses vLLM's own process border."""

    publication: dict[str, Any]
    config: dict[str, Any]
    broker: dict[str, Any] | None
    member_id: str
    directory: str  # of the notice socket, and of the copy that other workers of the engine read


@dataclass
class LoadRequest(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Load the version that this attempt has staged."""

    attempt: int
    verify: bool


class SlipstreamTransfer(WeightTransferEngine[StageRequest, LoadRequest]):  # type: ignore[misc]
    """Receives in the background and loads in place. With several workers, rank 0 receives for all of them."""

    init_info_cls = StageRequest
    update_info_cls = LoadRequest
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._workers: int = vllm_config.parallel_config.world_size
        self._first: bool = vllm_config.parallel_config.rank == 0
        self._directory = Path()
        self._receiver: Receiver | None = None
        self._layout: tuple[Any, ...] | None = None

    def init_transfer_engine(self, init_info: StageRequest) -> None:
        """Starts receiving; the outcome comes as a notice."""
        self._directory = Path(init_info.directory)
        if not self._first:
            return
        if self._receiver is None:
            self._receiver = Receiver(
                config=WeightsSyncConfig(**init_info.config),
                member_id=init_info.member_id,
                on_settled=self._notify,
                check=self._check,
                connect=None if init_info.broker is None else Access.of(init_info.broker),
                device=str(self.device),
            )
        fields = init_info.publication
        self._receiver.receive(Publication(**{**fields, "receivers": tuple(fields["receivers"])}))

    def start_weight_update(self) -> None:
        """Nothing: vLLM's layerwise reload would put the live model on the meta device."""

    def receive_weights(self, update_info: LoadRequest) -> None:
        """Loads the staged version. Raises SyncFailed; before the first write if nothing is staged."""
        staged = self._staged(update_info.attempt)
        load(self.model, staged)
        self._layout = staged.manifest.layout()
        if update_info.verify:
            verify(self.model, staged, whole=self._workers == 1)

    def finish_weight_update(self) -> None:
        """Nothing: everything is in place."""

    def shutdown(self) -> None:
        """Leaves a transfer under way."""
        if self._receiver is not None:
            self._receiver.close()

    def _check(self, manifest: Manifest) -> None:
        if self._layout is not None and manifest.layout() == self._layout:
            return
        check(self.model, manifest, workers=self._workers)

    def _notify(self, attempt: int, error: str) -> None:
        """[receiver's thread] Tells the generator process; a socket of its own, since sockets belong to threads."""
        if not error and self._workers > 1:
            self._share(attempt)
        outcome = outcome_file(self._directory, attempt)  # what is found if the message gets lost
        outcome.with_suffix(".part").write_text(error)
        outcome.with_suffix(".part").rename(outcome)
        socket: Any
        with zmq.Context.instance().socket(zmq.PUSH) as socket:
            socket.linger = _NOTICE_LINGER_MS
            socket.connect(notice_address(self._directory))
            socket.send(msgpack.packb([attempt, error]))

    def _share(self, attempt: int) -> None:
        """Leaves a copy in shared memory for the other workers of this engine."""
        assert self._receiver is not None
        staged = self._receiver.take(attempt)
        buffer = staged.staging.buffer
        path = self._directory / f"payload-{attempt}"
        torch.from_file(str(path), shared=True, size=buffer.numel(), dtype=torch.uint8).copy_(buffer)
        (self._directory / f"manifest-{attempt}").write_bytes(encode(staged.manifest))

    def _staged(self, attempt: int) -> Staged:
        if self._workers == 1:
            if self._receiver is None:
                raise SyncFailed("nothing was staged")
            return self._receiver.take(attempt)
        manifest = decode((self._directory / f"manifest-{attempt}").read_bytes())
        path = self._directory / f"payload-{attempt}"
        buffer = torch.from_file(str(path), shared=False, size=manifest.payload_bytes, dtype=torch.uint8)
        return Staged(manifest=manifest, staging=Staging(manifest.entries, buffer=buffer))


def notice_address(directory: Path) -> str:
    """Where the generator process listens for notices; the directory is private to its user."""
    return f"ipc://{directory}/notices"


def outcome_file(directory: Path, attempt: int) -> Path:
    """Where the outcome of an attempt is written: its error, empty when the version is staged."""
    return directory / f"settled-{attempt}"


def check(model: nn.Module, manifest: Manifest, *, workers: int = 1) -> None:
    """Raises LayoutRefused unless the manifest names exactly what this vLLM model loads, in shapes that fit.

    vLLM fuses projections (``packed_modules_mapping``): the wanted names are the parts, as the learner calls them.

    Args:
        workers: that the model is cut over.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if packed := [name for name, parameter in parameters.items() if parameter.numel() == 0]:
        raise LayoutRefused(f"vLLM has packed {packed[0]} away; the slipstream plug-in was not loaded before the model")
    for alias, target in manifest.tied.items():
        if alias in parameters and parameters[alias] is not parameters.get(target):
            raise LayoutRefused(f"{alias} is tied to {target} in the learner, but not in the engine's model")
    wanted = {part for name, _ in model.named_parameters() for part in _parts(model, name)}
    buffers = {name for name, _ in persistent_buffers(model)}
    check_names(
        wanted=wanted | (buffers & set(manifest.buffers)),
        got=[entry.name for entry in manifest.entries],
        who=f"the engine's {type(model).__name__}",
    )
    _check_shapes(model, {entry.name: entry.shape for entry in manifest.entries}, workers)


def _check_shapes(model: nn.Module, sent: Mapping[str, tuple[int, ...]], workers: int) -> None:
    """Before the swap: vLLM's own loaders find out in the middle of it, when the engine is past saving."""
    for name, parameter in model.named_parameters():
        live = list(parameter.shape)
        rows: Any = getattr(model.get_submodule(name.rpartition(".")[0]), "org_vocab_size", None)
        if rows is not None and workers == 1:
            live[0] = rows  # without padding
        parts = [(part, sent[part]) for part in _parts(model, name)]
        whole = [sum(shape[0] for _, shape in parts if shape), *parts[0][1][1:]] if live else []
        same_rest = all(shape[1:] == parts[0][1][1:] for _, shape in parts) and len(whole) == len(live)
        if not same_rest or not all(_fits(*sizes, workers) for sizes in zip(whole, live, strict=True)):
            came = ", ".join(f"{part} {list(shape)}" for part, shape in parts)
            raise LayoutRefused(f"{came} does not fit the engine's {name} {live} on {workers} worker(s)")


def _fits(sent: int, live: int, workers: int) -> bool:
    """Whether a dimension is whole on each worker, or a shard: padded, or the same on several, where it must be."""
    return sent == live if workers == 1 else live <= sent or sent <= live * workers


def load(model: nn.Module, staged: Staged) -> None:
    """Writes a staged version into the live weights. Raises LayoutRefused if a parameter was left out."""
    views, buffers = staged.staging.views, set(staged.manifest.buffers)
    loaded = model.load_weights((name, view) for name, view in views.items() if name not in buffers)  # type: ignore[operator]
    live = dict(model.named_buffers())
    for name in buffers:
        live[name].copy_(views[name])
    if loaded is not None and (left := sorted({name for name, _ in model.named_parameters()} - set(loaded))):
        raise LayoutRefused(f"not loaded: {', '.join(left)}")


def verify(model: nn.Module, staged: Staged, *, whole: bool) -> None:
    """Compares the live weights, un-fused, with the staged bytes. Raises SyncFailed naming what differs.

    Args:
        whole: every parameter is whole on this worker; otherwise shards are passed over.
    """
    for name, live in _live_parts(model, staged.staging.views, whole=whole):
        view = staged.staging.views[name]
        # The engine's type is the narrower one unless a bf16 wire feeds an fp32 engine, which is exact.
        if live.shape != view.shape or not _same_bytes(live, view.to(device=live.device, dtype=live.dtype)):
            raise SyncFailed(f"version {staged.manifest.version}: {name} in the engine is not what was sent")


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Bytes, not numbers: a NaN that was sent must not look like a broken load."""
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _live_parts(model: nn.Module, views: Mapping[str, Tensor], *, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """The live tensor behind each sent name: a row range of a fused parameter, without padding rows."""
    for fused, parameter in model.named_parameters():
        names, row = _parts(model, fused), 0
        rows_sent = sum(views[name].shape[0] for name in names)
        if not whole and (parameter.shape[0] < rows_sent or parameter.shape[1:] != views[names[0]].shape[1:]):
            continue  # a shard
        for name in names:
            rows = views[name].shape[0]
            yield name, parameter.data[row : row + rows]
            row += rows
    live = dict(model.named_buffers())
    yield from ((name, live[name]) for name in views if name in live)


def _parts(model: nn.Module, name: str) -> list[str]:
    """``...qkv_proj.weight`` -> the names of its parts; any other name -> itself."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    prefix, _, leaf = name.rpartition(".")
    owner, _, module = prefix.rpartition(".")
    return [f"{owner}.{part}.{leaf}" for part in packed[module]] if module in packed else [name]
