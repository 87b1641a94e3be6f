"""vLLM itself, on a CPU, fed by a real publisher. One engine serves all tests of a kind; they publish as they go."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from broker.config import RolloutConfig
from generators.config import GeneratorConfig
from generators.engine import EngineDead, NonFiniteLogits
from generators.vllm_env import vllm_environment
from tests.generators.learner_end import EOS, Learner, greedy, logprobs, prompt, qwen
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed

pytestmark = pytest.mark.slow

PROMPTS = [[2, 5 + i, 6, 7 + i, 8] for i in range(8)]
CONFIG = GeneratorConfig(kv_cache_bytes=32 << 20)


class Setup:
    """vLLM with the learner's version 0 in use, on one event loop."""

    def __init__(self, directory: Path, tied: bool) -> None:
        os.environ.update(vllm_environment(CONFIG))
        from generators.vllm_engine import VllmEngine

        self.model = qwen(tied)
        self.model.save_pretrained(directory)
        # The engine starts from other weights than the learner's: what it computes later has been received.
        self.sync = WeightsSyncConfig(
            sync_timeout_s=20.0,
            verify_load="always",
            on_update="keep" if tied else "recompute",
            wire_dtype="float32",
        )
        self.engine = VllmEngine(
            model_path=str(directory),
            rollout=RolloutConfig(max_prompt_length=256, max_response_length=256),
            config=CONFIG,
            sync=self.sync,
            dtype="float32",
            seed=0,
        )
        self.learner = Learner(self.model, self.sync)
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

    def close(self) -> None:
        self.run(self.engine.close())
        self.learner.publisher.close()
        self.runner.close()


@pytest.fixture(scope="module", params=[True, False], ids=["tied-keep", "untied-recompute"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("model"), tied=request.param)
    yield setup
    setup.close()


def test_c12_c13_c18_greedy_decoding_follows_three_published_versions(vllm: Setup) -> None:
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
    assert vllm.engine.policy_version == vllm.learner.version


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_c24_logprobs_are_those_of_the_sampling_temperature(vllm: Setup, temperature: float) -> None:
    samples = vllm.ask(PROMPTS[0], n=8, temperature=temperature)
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 8
    for sample in samples:
        wanted = logprobs(vllm.model, PROMPTS[0], sample.token_ids.tolist(), temperature)
        np.testing.assert_allclose(sample.behavior_logprobs, wanted, atol=1e-5)


def test_an_answer_ends_with_the_stop_token_or_at_its_length(vllm: Setup) -> None:
    samples = vllm.ask(PROMPTS[0], n=32, max_tokens=20)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        tokens = sample.token_ids.tolist()
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (sample.finish_reason == "stop")
        assert len(tokens) == 20 or sample.finish_reason == "stop"


def test_the_same_seed_and_attempt_give_the_same_answer(vllm: Setup) -> None:
    first, again = vllm.ask(PROMPTS[0], n=2), vllm.ask(PROMPTS[0], n=2)
    assert [x.token_ids.tolist() for x in first] == [x.token_ids.tolist() for x in again]
    other = vllm.run(vllm.engine.generate(prompt(PROMPTS[0], n=2), request_id="r", attempt=2))
    assert [x.token_ids.tolist() for x in first] != [x.token_ids.tolist() for x in other]


def test_c40_a_running_answer_goes_on_over_a_swap_with_the_version_of_every_token(vllm: Setup) -> None:
    before = {name: value.clone() for name, value in vllm.model.state_dict().items()}

    async def swap_meanwhile() -> Any:
        long = prompt(PROMPTS[0], n=8, max_tokens=250)
        answer = asyncio.create_task(vllm.engine.generate(long, request_id="long", attempt=1))
        await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=2), request_id="short", attempt=1)
        vllm.learner.step()
        await vllm.learner.publish(vllm.engine)
        return await answer

    samples = vllm.run(swap_meanwhile())
    old = qwen("lm_head.weight" not in dict(vllm.model.named_parameters()))
    old.load_state_dict(before)
    crossed = [sample for sample in samples if len(sample.version_runs) == 2]
    assert crossed
    for sample in crossed:
        (first, cut), (second, rest) = sample.version_runs.tolist()
        tokens = sample.token_ids.tolist()
        assert (first, second) == (vllm.learner.version - 1, vllm.learner.version)
        assert cut + rest == len(tokens)
        was = logprobs(old, PROMPTS[0], tokens, 1.0)
        now = logprobs(vllm.model, PROMPTS[0], tokens, 1.0)
        np.testing.assert_allclose(sample.behavior_logprobs[:cut], was[:cut], atol=1e-5)
        if vllm.sync.on_update == "recompute":
            np.testing.assert_allclose(sample.behavior_logprobs[cut:], now[cut:], atol=1e-5)
        assert np.abs(was[cut:] - now[cut:]).max() > 1e-3


def test_c21_a_repeated_prompt_meets_no_cached_block_of_an_older_version(vllm: Setup) -> None:
    ids = PROMPTS[0] * 40  # over 128 tokens: a whole block of vLLM's cache on a CPU
    for _ in range(2):
        (sample,) = vllm.ask(ids)
        np.testing.assert_allclose(
            sample.behavior_logprobs, logprobs(vllm.model, ids, sample.token_ids.tolist(), 1.0), atol=1e-5
        )
        vllm.publish()


def test_c40_prompts_that_come_during_a_swap_are_the_new_versions_and_meet_no_older_block(vllm: Setup) -> None:
    ids = PROMPTS[0] * 40

    async def meanwhile() -> Any:
        asked = [vllm.engine.generate(prompt(ids, seed=i), request_id=f"r{i}", attempt=1) for i in range(4)]
        publication = await vllm.learner.staged(vllm.engine)
        _, *answers = await asyncio.gather(vllm.engine.swap(publication), *asked)
        await vllm.learner.in_use()
        return answers

    vllm.ask(ids)
    vllm.learner.step()
    for (sample,) in vllm.run(meanwhile()):
        tokens = sample.token_ids.tolist()
        assert sample.version_runs.tolist() == [[vllm.learner.version, len(tokens)]]
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs(vllm.model, ids, tokens, 1.0), atol=1e-5)


def test_requests_that_wait_in_vllms_queue_over_a_swap_start_from_the_new_version_alone(vllm: Setup) -> None:
    ids = PROMPTS[0] * 40

    async def crowd() -> Any:
        asked = [prompt(ids, n=8, max_tokens=40, seed=i) for i in range(2 * CONFIG.max_num_seqs // 8)]
        answers = asyncio.gather(
            *(vllm.engine.generate(one, request_id=f"r{i}", attempt=1) for i, one in enumerate(asked))
        )
        await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=2), request_id="short", attempt=1)
        vllm.learner.step()
        await vllm.learner.publish(vllm.engine)
        return [sample for samples in await answers for sample in samples]

    vllm.ask(ids)
    samples = vllm.run(crowd())
    assert len(samples) == 2 * CONFIG.max_num_seqs
    late = [sample for sample in samples if sample.version_runs[0, 0] == vllm.learner.version]
    assert len(late) >= CONFIG.max_num_seqs / 2 and len(late) < len(samples)
    for sample in late:
        wanted = logprobs(vllm.model, ids, sample.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(sample.behavior_logprobs, wanted, atol=1e-5)


def test_more_prompt_tokens_than_one_step_takes_are_answered_under_their_seeds(vllm: Setup) -> None:
    async def crowd() -> Any:
        asked = [prompt(ids * 50, n=4, max_tokens=4, seed=i) for i, ids in enumerate(PROMPTS)]
        return await asyncio.gather(
            *(vllm.engine.generate(one, request_id=f"r{i}", attempt=1) for i, one in enumerate(asked))
        )

    answers = vllm.run(crowd())  # 8 x 4 x 250 prompt tokens
    assert [len(samples) for samples in answers] == [4] * 8
    wanted = logprobs(vllm.model, PROMPTS[3] * 50, answers[3][2].token_ids.tolist(), 1.0)
    np.testing.assert_allclose(answers[3][2].behavior_logprobs, wanted, atol=1e-5)


def test_an_aborted_answer_comes_back_with_what_there_is(vllm: Setup) -> None:
    async def abort() -> Any:
        answer = asyncio.create_task(
            vllm.engine.generate(prompt(PROMPTS[0], n=8, max_tokens=250), request_id="long", attempt=1)
        )
        await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=3), request_id="short", attempt=1)
        await vllm.engine.abort("long")
        return await answer

    samples = vllm.run(abort())
    assert "abort" in {sample.finish_reason for sample in samples}
    for sample in samples:
        lengths = {len(sample.token_ids), len(sample.behavior_logprobs), int(sample.version_runs[:, 1].sum())}
        assert len(lengths) == 1 and lengths.pop() < 250


def test_c23_an_unknown_and_a_missing_name_leave_the_old_version_serving(vllm: Setup) -> None:
    before = vllm.run(vllm.engine._engine.compute_weight_checksums())
    answer = vllm.ask(PROMPTS[0], temperature=0.0)[0].token_ids.tolist()
    odd = torch.nn.Module()
    for name, parameter in vllm.model.named_parameters():
        if "mlp" not in name:
            odd.register_parameter(name.replace(".", "/"), torch.nn.Parameter(parameter.detach().clone()))
    odd.register_parameter("surplus", torch.nn.Parameter(torch.zeros(2)))
    renamed = [(name.replace("/", "."), parameter) for name, parameter in odd.named_parameters()]
    learner = Learner(_Named(renamed), vllm.sync)
    learner.publisher.offer(1, renamed)

    async def stage() -> None:
        await vllm.engine.stage(await learner.announced(1), member_id="g1")

    with pytest.raises(SyncFailed, match=r"unknown: surplus; missing: model\.layers\.0\.mlp\.down_proj\.weight"):
        vllm.run(stage())
    learner.publisher.close()
    assert vllm.run(vllm.engine._engine.compute_weight_checksums()) == before
    assert vllm.ask(PROMPTS[0], temperature=0.0)[0].token_ids.tolist() == answer
    assert vllm.engine.policy_version == vllm.learner.version


def test_c28_weights_whose_logits_are_not_numbers_stop_the_version_by_its_number(vllm: Setup) -> None:
    with torch.no_grad():
        vllm.model.model.layers[0].mlp.up_proj.weight.fill_(3e38)
    vllm.run(vllm.learner.publish(vllm.engine))
    with pytest.raises(NonFiniteLogits, match=f"non-finite logits at version {vllm.learner.version}"):
        vllm.ask(PROMPTS[0])


def test_c56_a_killed_engine_is_reported_as_dead_and_not_waited_for(vllm: Setup) -> None:
    cores = [child for child in psutil.Process().children() if "EngineCore" in child.name()]
    assert cores

    async def kill() -> None:
        answer = asyncio.create_task(
            vllm.engine.generate(prompt(PROMPTS[0], n=8, max_tokens=250), request_id="long", attempt=1)
        )
        with contextlib.suppress(NonFiniteLogits):  # vLLM's cache keeps the NaN of the test before
            await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=2), request_id="short", attempt=1)
        for core in cores:
            os.kill(core.pid, signal.SIGKILL)
        await asyncio.wait_for(answer, 20)

    with pytest.raises(EngineDead):
        vllm.run(kill())


class _Named(torch.nn.Module):
    """A module whose parameters have exactly these names."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__()
        self._named = parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named)
