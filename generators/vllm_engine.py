"""vLLM as an engine: AsyncLLM owned by this process, token ids in, token ids and log-probabilities out.

generate: Prompt -> AsyncLLM -> Sample per completion, with the policy version of every token
stage:    Publication -> the plug-in in vLLM's worker receives in the background -> notice over ZeroMQ
swap:     pause scheduling -> load in place, label the version -> resume; running requests go on
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shutil
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from broker.config import RolloutConfig
from broker.connect import Access
from broker.messages import Prompt, Publication
from generators.config import GeneratorConfig
from generators.engine import EngineDead, NonFiniteLogits, Sample
from generators.seeds import sampling_seed
from generators.stop_tokens import stop_token_ids
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed
from weights_sync.vllm_plugin import BACKEND, notice_address, outcome_file
from weights_sync.vllm_prefix_cache import salt

_LOOK_S = 0.5  # between looks at an engine that is to answer; it cannot tell us of its own death
_CPU_STEP_TOKENS = 2048  # prompt tokens computed in one step
_ENDINGS = ("stop", "length", "abort")


class VllmEngine:
    """generators.engine.Engine over vLLM. ``generators.vllm_env.vllm_environment`` must be applied before import.

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
        self._stop_ids = list(stop_token_ids(model_path))
        self._version = -1
        self._loads = 0
        self._admits = asyncio.Event()  # cleared during a swap
        self._admits.set()
        self._stall_s = 0.0
        self._calls: set[asyncio.Task[Any]] = set()
        self._engine: Any = None
        self._directory = Path()
        self._notices: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[str]] = {}

    @property
    def policy_version(self) -> int:
        """The version in use; -1 before the first swap."""
        return self._version

    @property
    def swap_stall_s(self) -> float:
        """For how long nothing could be sampled during the last swap."""
        return self._stall_s

    async def start(self) -> None:
        """Loads the model, in a thread, so that heartbeats go on meanwhile."""
        self._directory = Path(tempfile.mkdtemp(prefix="slipstream-"))
        self._notices = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._notices.bind(notice_address(self._directory))
        self._reader = asyncio.create_task(self._read_notices())
        self._engine = await asyncio.to_thread(AsyncLLM.from_engine_args, self._engine_args())

    async def generate(self, prompt: Prompt, *, request_id: str, attempt: int) -> Sequence[Sample]:
        """Samples ``prompt.n`` completions; those that vLLM itself failed are missing from the answer.

        Raises EngineDead, or NonFiniteLogits: then the engine is to be replaced, because blocks of its cache keep the
        NaN and spoil later answers, whatever the weights.
        """
        await self._admits.wait()  # bounded: a swap ends, or the generator does
        # Cached blocks of another version's keys and values must not serve this prompt.
        tokens: dict[str, Any] = {"prompt_token_ids": prompt.token_ids.tolist(), "cache_salt": salt(self._loads)}
        final = None
        try:
            async for output in self._engine.generate(tokens, self._sampling(prompt, attempt), request_id):
                final = output
        except EngineDeadError as error:
            raise EngineDead(f"vLLM's engine died while answering {request_id}: {error}") from error
        outputs = [] if final is None else final.outputs
        return [_sample(o, self._version) for o in outputs if o is not None and o.finish_reason in _ENDINGS]

    async def abort(self, request_id: str) -> None:
        """Ends a running request early; its ``generate`` returns what is there."""
        await self._engine.abort(request_id)

    async def stage(self, publication: Publication, *, member_id: str) -> None:
        """Receives into the worker's staging. Raises SyncFailed, or EngineDead."""
        settled = asyncio.get_running_loop().create_future()
        self._waiting[publication.attempt] = settled
        request = {
            "publication": {**dataclasses.asdict(publication), "receivers": list(publication.receivers)},
            "config": self._sync.model_dump(),
            "broker": None if self._broker is None else self._broker.plain(),
            "member_id": member_id,
            "directory": str(self._directory),
        }
        try:
            begin = self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=request))
            await self._answer(begin, "while beginning to receive")
            while not settled.done():
                # Bounded: the worker's receiver settles every attempt within its own deadlines, or is found dead.
                await asyncio.wait({settled}, timeout=_LOOK_S)
                if not settled.done():
                    await self._answer(self._engine.get_weight_version(), "while receiving")
                    self._look(publication.attempt)
        except EngineDeadError as error:
            raise EngineDead(f"vLLM's engine died while receiving weights: {error}") from error
        finally:
            del self._waiting[publication.attempt]
            outcome_file(self._directory, publication.attempt).unlink(missing_ok=True)
        if failed := settled.result():
            raise SyncFailed(failed)

    async def swap(self, publication: Publication) -> None:
        """Loads the staged version between two engine steps. Raises EngineDead: a half-loaded model never serves.

        Requests that come meanwhile wait here, for the new version. Once begun it ends, even if whoever waits for it
        is cancelled: what runs goes on.
        """
        self._admits.clear()
        try:
            await self._answer(self._swap(publication), f"while version {publication.version} was loaded")
        except EngineDead:
            raise
        except Exception as error:  # vLLM reports a failed call in its worker as a bare Exception
            raise EngineDead(f"version {publication.version} could not be loaded: {error}") from error
        finally:
            self._admits.set()

    async def _swap(self, publication: Publication) -> None:
        first = self._loads == 0
        verify = self._sync.verify_load == "always" or (self._sync.verify_load == "first" and first)
        core = self._engine.engine_core  # pause_generation does the same and then sleeps for 20 ms
        load = {"attempt": publication.attempt, "verify": verify}
        anew = self._sync.on_update != "keep"  # with drain nothing runs, and the blocks of the old version are free
        await self._engine.start_weight_update()
        # Between pause and resume nothing is sampled: two turns to the core and back, and the load.
        began = time.monotonic()
        await core.pause_scheduler_async(mode="keep", clear_cache=anew)
        await asyncio.gather(
            self._engine.update_weights(WeightTransferUpdateRequest(update_info=load)),
            self._engine.update_weight_version(str(publication.version)),
        )
        await core.resume_scheduler_async()
        self._stall_s = time.monotonic() - began
        await self._engine.finish_weight_update()
        for name in ("payload", "manifest"):
            (self._directory / f"{name}-{publication.attempt}").unlink(missing_ok=True)
        self._loads += 1
        self._version = publication.version

    async def _answer(self, call: Coroutine[Any, Any, Any], when: str) -> Any:
        """What vLLM's core answers. Raises EngineDead when it does not within ``weights_sync.sync_timeout_s``.

        Counted in looks, so that a process that was stopped for a while does not take its core for dead.
        """
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        for _ in range(math.ceil(self._sync.sync_timeout_s / _LOOK_S)):
            await asyncio.wait({task}, timeout=_LOOK_S)
            if task.done():
                return task.result()
            if self._engine.errored:
                break
        task.cancel()
        reason = (
            "died"
            if self._engine.errored
            else (f"did not answer within weights_sync.sync_timeout_s = {self._sync.sync_timeout_s:g} s")
        )
        raise EngineDead(f"vLLM's core {reason} {when}")

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # seen, even where nobody waits for it any more

    async def close(self) -> None:
        """Stops vLLM and its processes."""
        for call in self._calls:
            call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._notices.close(linger=0)
        if self._engine is not None:
            if (handler := self._engine.output_handler) is not None:
                handler.cancel()  # first, or it takes the core's orderly end for its death
                await asyncio.gather(handler, return_exceptions=True)
            await asyncio.to_thread(self._engine.shutdown)
        if self._directory != Path():
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _read_notices(self) -> None:
        """Waits for the worker's notices; ended by ``close``."""
        while True:
            self._settle(*msgpack.unpackb(await self._notices.recv()))

    def _look(self, attempt: int) -> None:
        """For an outcome whose notice has been lost."""
        outcome = outcome_file(self._directory, attempt)
        if outcome.exists():
            self._settle(attempt, outcome.read_text())

    def _settle(self, attempt: int, error: str) -> None:
        future = self._waiting.get(attempt)
        if future is not None and not future.done():
            future.set_result(error)

    def _sampling(self, prompt: Prompt, attempt: int) -> Any:
        greedy = prompt.temperature == 0
        return SamplingParams(
            n=prompt.n,
            max_tokens=prompt.max_tokens,
            temperature=prompt.temperature,
            top_p=1.0 if greedy else self._rollout.top_p,
            top_k=0 if greedy else max(0, self._rollout.top_k),
            seed=None if greedy else sampling_seed(prompt.seed, attempt),
            stop_token_ids=self._stop_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _engine_args(self) -> Any:
        arguments: dict[str, Any] = {
            "model": self._model_path,
            "skip_tokenizer_init": True,
            "dtype": self._dtype,
            "seed": self._seed,
            "max_model_len": self._rollout.max_prompt_length + self._rollout.max_response_length,
            "max_num_seqs": self._config.max_num_seqs,
            "enforce_eager": self._config.enforce_eager,
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # sampling is ours; a model's own defaults must not truncate it
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, at its temperature
            "disable_log_stats": True,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        }
        if self._config.device == "cpu":
            arguments["kv_cache_memory_bytes"] = self._config.kv_cache_bytes
            # A seeded request whose prompt is computed in parts ends vLLM's core on a CPU: it winds the request's
            # generator back, which torch cannot do there.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(arguments["max_model_len"], _CPU_STEP_TOKENS)
        else:
            arguments["gpu_memory_utilization"] = self._config.gpu_memory_utilization
        return AsyncEngineArgs(**{**arguments, **self._config.extra_engine_args})


def _sample(output: CompletionOutput, version: int) -> Sample:
    """Raises NonFiniteLogits. A completion aborted before its first token has no versions of its own."""
    count = len(output.token_ids)
    logprobs = np.zeros(count, np.float32)
    if count:
        flat = output.logprobs
        logprobs[:] = [flat.logprobs[start] for start in flat.start_indices]
    if not np.isfinite(logprobs).all():
        raise NonFiniteLogits(f"non-finite logits at version {version}")
    spans = output.weight_versions or []
    runs = [(int(span.version), span.end - span.start) for span in spans if span.end > span.start]
    return Sample(
        token_ids=np.asarray(output.token_ids, np.int32),
        behavior_logprobs=logprobs,
        version_runs=np.asarray(runs, np.int32).reshape(-1, 2),
        finish_reason=str(output.finish_reason),
    )
