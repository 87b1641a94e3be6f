"""vLLM with two worker processes on a CPU: rank 0 receives, both load their shards of the same version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.config import RolloutConfig
from generators.config import GeneratorConfig
from generators.vllm_env import vllm_environment
from tests.generators.learner_end import Learner, greedy, logprobs, prompt, qwen
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed

pytestmark = pytest.mark.slow

PROMPTS = [[2, 5 + i, 6, 7 + i, 8] for i in range(4)]
CONFIG = GeneratorConfig(kv_cache_bytes=32 << 20, tensor_parallel_size=2)
SYNC = WeightsSyncConfig(sync_timeout_s=20.0, verify_load="always", on_update="recompute")


class Setup:
    """vLLM over two workers with the learner's version 0 in use, on one event loop."""

    def __init__(self, directory: Path) -> None:
        from generators.vllm_engine import VllmEngine

        self.model = qwen(tied=False)
        self.model.save_pretrained(directory)
        self.engine = VllmEngine(
            model_path=str(directory),
            rollout=RolloutConfig(max_prompt_length=256, max_response_length=256),
            config=CONFIG,
            sync=SYNC,
            dtype="float32",
            seed=0,
        )
        self.learner = Learner(self.model, SYNC)
        self.runner = asyncio.Runner()
        self.run(self.engine.start())
        self.publish()

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def publish(self) -> None:
        """One more version, with other weights, in use on both workers."""
        self.learner.step()
        self.run(self.learner.publish(self.engine))

    def close(self) -> None:
        self.run(self.engine.close())
        self.learner.publisher.close()
        self.runner.close()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        for name, value in vllm_environment(CONFIG).items():
            patch.setenv(name, value)
        setup = Setup(tmp_path_factory.mktemp("model"))
        yield setup
        setup.close()


def test_both_workers_follow_three_published_versions(vllm: Setup) -> None:
    async def ask_all() -> Any:
        asked = [prompt(ids, temperature=0.0) for ids in PROMPTS]
        return await asyncio.gather(
            *(vllm.engine.generate(one, request_id=f"r{i}", attempt=1) for i, one in enumerate(asked))
        )

    for _ in range(3):
        vllm.publish()
        samples = [sample for (sample,) in vllm.run(ask_all())]
        assert [sample.token_ids.tolist() for sample in samples] == greedy(vllm.model, PROMPTS, 32)
        for sample in samples:
            assert sample.version_runs.tolist() == [[vllm.learner.version, len(sample.token_ids)]]


def test_logprobs_are_those_of_the_published_weights(vllm: Setup) -> None:
    (sample,) = vllm.run(vllm.engine.generate(prompt(PROMPTS[0]), request_id="r", attempt=1))
    wanted = logprobs(vllm.model, PROMPTS[0], sample.token_ids.tolist(), 1.0)
    np.testing.assert_allclose(sample.behavior_logprobs, wanted, atol=1e-5)


def test_nothing_of_a_version_is_left_in_the_engines_folder(vllm: Setup) -> None:
    vllm.publish()
    assert [path.name for path in vllm.engine._directory.iterdir()] == ["notices"]


def test_a_layout_that_does_not_fit_is_refused_before_either_worker_loads(vllm: Setup) -> None:
    before = vllm.run(vllm.engine._engine.compute_weight_checksums())
    named = [(name, p) for name, p in vllm.model.named_parameters() if "mlp" not in name]
    odd = torch.nn.Module()
    odd.named_parameters = lambda *args, **kwargs: iter(named)  # type: ignore[method-assign]
    learner = Learner(odd, SYNC)
    learner.publisher.offer(1, named)

    async def stage() -> None:
        await vllm.engine.stage(await learner.announced(1), member_id="g1")

    with pytest.raises(SyncFailed, match=r"missing: model\.layers\.0\.mlp\.down_proj\.weight"):
        vllm.run(stage())
    learner.publisher.close()
    assert vllm.run(vllm.engine._engine.compute_weight_checksums()) == before
