"""A transformers model as an engine: slower than vLLM, on anything that torch runs on, and the serial mode's engine.

    generate -> [worker thread: one token for every running prompt, then the next round] -> Sample per completion
    stage    -> Receiver's thread -> staged bytes;   swap -> the worker loads them between two rounds

The worker waits for a command or, while prompts are running, for nothing; every command wakes it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from broker.config import RolloutConfig
from broker.connect import Access
from broker.messages import Prompt, Publication
from generators.config import GeneratorConfig
from generators.engine import EngineDead, Sample
from generators.seeds import sampling_seed
from generators.stop_tokens import stop_token_ids
from generators.token_loop import Answering
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.manifest import Manifest, check_names, check_shape
from weights_sync.receiver import Receiver
from weights_sync.staging import Declaration, Staging, declare, dtype_name, torch_dtype

_JOIN_S = 10.0


class HfEngine:
    """generators.engine.Engine over transformers.

    ``load_model``, ``load_weights`` and ``generate_now`` work in the caller's thread and need no event loop.
    ``broker``: for ``weights_sync.transport = relay``.
    """

    def __init__(
        self,
        *,
        model_path: str,
        rollout: RolloutConfig,
        config: GeneratorConfig,
        sync: WeightsSyncConfig,
        dtype: str,
        seed: int,
        broker: Access | None = None,
    ) -> None:
        self._broker = broker
        self._model_path, self._rollout, self._config, self._sync = model_path, rollout, config, sync
        self._dtype, self._seed = dtype, seed
        self._stop_ids = stop_token_ids(model_path)
        self._version = -1
        self._stall_s = 0.0
        self._model: Any = None
        self._declaration = Declaration(specs=(), tied={})
        self._receiver: Receiver | None = None
        self._settled: dict[int, Callable[[str], None]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._running: dict[str, tuple[Answering, Callable[[Answering | Exception], None]]] = {}
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="sampling", daemon=True)

    @property
    def policy_version(self) -> int:
        """The version in use; -1 before the first swap."""
        return self._version

    # -- in-process use: one thread, no event loop ---------------------------------------------------------------
    def load_model(self) -> None:
        """Loads the model's files."""
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=torch_dtype(self._dtype))
        self._model = model.to(self._config.device).eval().requires_grad_(False)
        self._declaration = declare(self._model)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Puts a whole version into use at once. Raises LayoutRefused with the old weights untouched."""
        staging = Staging.planned(self._declaration, wire_dtype=dtype_name(self._model.dtype))
        staging.fill(tensors)
        self._load(staging, version)

    def generate_now(self, prompt: Prompt, attempt: int) -> list[Sample]:
        """Samples in the caller's thread. Raises NonFiniteLogits."""
        answering = self._answering(prompt, attempt)
        while not answering.done:
            answering.step(self._version)
        return answering.samples()

    # -- generators.engine.Engine --------------------------------------------------------------------------------

    @property
    def swap_stall_s(self) -> float:
        """How long the worker took to load the last version."""
        return self._stall_s

    async def start(self) -> None:
        """Loads the model and starts sampling."""
        torch.set_num_threads(self._config.threads)
        await asyncio.to_thread(self.load_model)
        self._worker.start()

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """Samples ``prompt.n`` completions. Raises NonFiniteLogits or EngineDead."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answering] = loop.create_future()

        def deliver(result: Answering | Exception) -> None:
            loop.call_soon_threadsafe(_resolve, answer, result)

        def begin() -> None:
            self._running[request_id] = (self._answering(prompt, attempt), deliver)

        self._command(begin)
        try:
            return (await answer).samples()
        except asyncio.CancelledError:
            await self.abort(request_id)
            raise

    async def abort(self, request_id: str) -> None:
        """Ends a running request early; its ``generate`` returns what is there."""

        def end() -> None:
            if request_id in self._running:
                answering, deliver = self._running.pop(request_id)
                deliver(answering)

        self._command(end)

    async def stage(self, publication: Publication, *, member_id: str) -> None:
        """Receives into staging. Raises SyncFailed."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[str] = loop.create_future()

        def settle(error: str) -> None:
            loop.call_soon_threadsafe(_resolve, settled, error)

        self._settled[publication.attempt] = settle
        if self._receiver is None:
            self._receiver = Receiver(
                config=self._sync,
                member_id=member_id,
                on_settled=lambda attempt, error: self._settled.pop(attempt)(error),
                check=self._check,
                connect=self._broker,
                device=self._config.device,
            )
        self._receiver.receive(publication)
        if error := await settled:  # bounded: the receiver settles every attempt within its own deadlines
            raise SyncFailed(error)

    async def swap(self, publication: Publication) -> None:
        """Loads the staged version between two rounds. Raises EngineDead: a half-loaded model never serves."""
        assert self._receiver is not None
        staged = self._receiver.take(publication.attempt)
        loop = asyncio.get_running_loop()
        swapped: asyncio.Future[None] = loop.create_future()

        def put() -> None:
            began = time.monotonic()
            try:
                self._load(staged.staging, publication.version)
                if self._sync.on_update == "recompute":
                    for answering, _ in self._running.values():
                        answering.forget_cache()
                self._stall_s = time.monotonic() - began
                loop.call_soon_threadsafe(_resolve, swapped, None)
            except (SyncFailed, RuntimeError) as error:
                dead = EngineDead(f"version {publication.version} could not be loaded: {error}")
                loop.call_soon_threadsafe(_resolve, swapped, dead)

        self._command(put)
        await swapped

    async def close(self) -> None:
        """Ends the worker; running requests end early."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)
        if self._worker.is_alive():
            await asyncio.to_thread(self._worker.join, _JOIN_S)

    # -- the worker ----------------------------------------------------------------------------------------------
    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise EngineDead("the engine is closed")
            self._commands.append(command)
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._commands or self._running)
                if self._closed:
                    break
                commands = [self._commands.popleft() for _ in range(len(self._commands))]
            for command in commands:
                command()
            for request_id in list(self._running):
                self._round(request_id)
        for answering, deliver in self._running.values():
            deliver(answering)

    def _round(self, request_id: str) -> None:
        answering, deliver = self._running[request_id]
        try:
            answering.step(self._version)
        except Exception as error:  # this prompt's answer fails, the others go on
            del self._running[request_id]
            deliver(error)
            return
        if answering.done:
            del self._running[request_id]
            deliver(answering)

    def _answering(self, prompt: Prompt, attempt: int) -> Answering:
        return Answering(
            self._model,
            prompt,
            seed=sampling_seed(prompt.seed, attempt),
            stop_ids=self._stop_ids,
            top_p=self._rollout.top_p,
            top_k=self._rollout.top_k,
        )

    # -- weights -------------------------------------------------------------------------------------------------
    def _check(self, manifest: Manifest) -> None:
        """Raises LayoutRefused unless the manifest is exactly what this model takes."""
        specs = {spec.name: spec for spec in self._declaration.specs}
        buffers = {spec.name for spec in self._declaration.specs if spec.buffer}
        check_names(
            wanted=(specs.keys() - buffers) | (buffers & set(manifest.buffers)),
            got=[entry.name for entry in manifest.entries],
            who=f"this {type(self._model).__name__}",
        )
        if dict(manifest.tied) != dict(self._declaration.tied):
            raise LayoutRefused(f"tied in the learner: {dict(manifest.tied)}, here: {dict(self._declaration.tied)}")
        for entry in manifest.entries:
            check_shape(entry, specs[entry.name].shape)

    def _load(self, staging: Staging, version: int) -> None:
        live = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        with torch.no_grad():
            for name, view in staging.views.items():
                live[name].copy_(view)
        self._version = version


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
