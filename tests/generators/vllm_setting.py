"""vLLM on a CPU with a learner's end of weight sync, for tests of the two together."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil

from broker.config import RolloutConfig
from broker.connect import Access
from generators.config import GeneratorConfig
from generators.vllm_env import vllm_environment
from tests.generators.learner_end import Learner, prompt, qwen
from weights_sync.config import WeightsSyncConfig

CONFIG = GeneratorConfig(kv_cache_bytes=32 << 20)
PROMPTS = [[2, 5 + i, 6, 7 + i, 8] for i in range(8)]


class Setup:
    """vLLM with the learner's version 0 in use, on one event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        tied: bool,
        sync: WeightsSyncConfig,
        config: GeneratorConfig = CONFIG,
        access: Access | None = None,
    ) -> None:
        os.environ.update(vllm_environment(config))
        from generators.vllm_engine import VllmEngine

        self.sync, self.model = sync, qwen(tied)
        self.model.save_pretrained(directory)
        # The engine starts from other weights than the learner's: what it computes later has been received.
        self.engine = VllmEngine(
            model_path=str(directory),
            rollout=RolloutConfig(max_prompt_length=256, max_response_length=256),
            config=config,
            sync=sync,
            dtype="float32",
            seed=0,
            broker=access,
        )
        self.learner = Learner(self.model, sync, access)
        self.runner = asyncio.Runner()
        self.run(self.engine.start())
        self.publish()

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def publish(self) -> None:
        """One more version, with other weights, in use everywhere."""
        self.learner.step()
        self.run(self.learner.publish(self.engine))

    def ask(self, ids: list[int], **fields: Any) -> Any:
        return self.run(self.engine.generate(prompt(ids, **fields), request_id="r", attempt=1))

    def ask_all(self) -> Any:
        """The greedy answer to each prompt."""

        async def asked() -> Any:
            prompts = [prompt(ids, temperature=0.0) for ids in PROMPTS]
            return await asyncio.gather(
                *(self.engine.generate(one, request_id=f"r{i}", attempt=1) for i, one in enumerate(prompts))
            )

        return [sample for (sample,) in self.run(asked())]

    def checksums(self) -> Any:
        """Of the live weights."""
        return self.run(self.engine._engine.compute_weight_checksums())

    def close(self) -> None:
        self.run(self.engine.close())
        self.learner.close()
        self.runner.close()


def cores() -> list[psutil.Process]:
    """The processes of vLLM's core that this one has started."""
    return [child for child in psutil.Process().children() if "EngineCore" in child.name()]
