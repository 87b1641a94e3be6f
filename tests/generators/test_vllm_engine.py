"""vLLM itself, on a CPU, fed by a real publisher. One engine serves all tests of a kind; they publish as they go."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from generators.engine import EngineDead, NonFiniteLogits
from tests.generators.learner_end import EOS, Learner, greedy, logprobs, prompt, qwen
from tests.generators.vllm_setting import CONFIG, PROMPTS, Setup, cores
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[True, False], ids=["tied-keep", "untied-recompute"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    sync = WeightsSyncConfig(
        sync_timeout_s=20.0,
        verify_load="always",
        on_update="keep" if request.param else "recompute",
        wire_dtype="float32",
    )
    setup = Setup(tmp_path_factory.mktemp("model"), tied=request.param, sync=sync)
    yield setup
    setup.close()


def test_c12_c13_c18_greedy_decoding_follows_three_published_versions(vllm: Setup) -> None:
    for _ in range(3):
        vllm.publish()
        samples = vllm.ask_all()
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


def without_mlp(named: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
    return [*((n, p) for n, p in named if "mlp" not in n), ("surplus", torch.nn.Parameter(torch.zeros(2)))]


def in_shape(name: str, *shape: int) -> Callable[..., list[tuple[str, torch.nn.Parameter]]]:
    return lambda named: [(n, torch.nn.Parameter(torch.zeros(shape)) if n == name else p) for n, p in named]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (without_mlp, r"unknown: surplus; missing: model\.layers\.0\.mlp\.down_proj\.weight"),
        (in_shape("model.norm.weight", 32), r"model\.norm\.weight \[32\] does not fit"),
        (in_shape("model.embed_tokens.weight", 51, 64), r"model\.embed_tokens\.weight \[51, 64\] does not fit"),
        (in_shape("model.layers.1.mlp.up_proj.weight", 96, 64), r"layers\.1\.mlp\.up_proj\.weight \[96, 64\] does not"),
        (in_shape("model.layers.0.self_attn.k_proj.weight", 32, 32), r"self_attn\.k_proj\.weight \[32, 32\]"),
    ],
    ids=["names", "vector", "vocabulary", "rows of a fused part", "columns of a fused part"],
)
def test_c23_what_does_not_fit_is_refused_by_name_and_the_old_version_serves(
    vllm: Setup, changed: Callable[..., list[tuple[str, torch.nn.Parameter]]], said: str
) -> None:
    before = vllm.checksums()
    answer = vllm.ask(PROMPTS[0], temperature=0.0)[0].token_ids.tolist()
    named = changed(list(vllm.model.named_parameters()))
    learner = Learner(_Named(named), vllm.sync)
    learner.publisher.offer(1, named)

    async def stage() -> None:
        await vllm.engine.stage(await learner.announced(1), member_id="g1")

    with pytest.raises(SyncFailed, match=said):
        vllm.run(stage())
    learner.close()
    assert vllm.checksums() == before
    assert vllm.ask(PROMPTS[0], temperature=0.0)[0].token_ids.tolist() == answer
    assert vllm.engine.policy_version == vllm.learner.version


def test_answers_aborted_at_a_swap_are_consistent_and_the_others_go_on(vllm: Setup) -> None:
    async def abort_at_the_swap() -> Any:
        asked = [prompt(PROMPTS[i], n=8, max_tokens=250, seed=i) for i in range(2)]
        answers = [
            asyncio.create_task(vllm.engine.generate(one, request_id=f"long{i}", attempt=1))
            for i, one in enumerate(asked)
        ]
        await vllm.engine.generate(prompt(PROMPTS[2], max_tokens=3), request_id="short", attempt=1)
        vllm.learner.step()
        publication = await vllm.learner.staged(vllm.engine)
        await asyncio.gather(vllm.engine.abort("long0"), vllm.engine.swap(publication))
        await vllm.learner.in_use()
        return await asyncio.gather(*answers)

    aborted, others = vllm.run(abort_at_the_swap())
    assert "abort" in {sample.finish_reason for sample in aborted}
    assert {sample.finish_reason for sample in others} <= {"stop", "length"} and len(others) == 8
    for sample in (*aborted, *others):
        assert len(sample.token_ids) == len(sample.behavior_logprobs) == sample.version_runs[:, 1].sum()
    assert [sample.token_ids.tolist() for sample in vllm.ask_all()] == greedy(vllm.model, PROMPTS, 32)


def test_a_swap_that_nobody_waits_for_any_more_ends_all_the_same(vllm: Setup) -> None:
    async def cancelled() -> Any:
        answer = asyncio.create_task(
            vllm.engine.generate(prompt(PROMPTS[0], n=8, max_tokens=250), request_id="long", attempt=1)
        )
        await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=2), request_id="short", attempt=1)
        vllm.learner.step()
        publication = await vllm.learner.staged(vllm.engine)
        swap = asyncio.create_task(vllm.engine.swap(publication))
        await asyncio.sleep(0)  # begun
        swap.cancel()
        samples = await asyncio.wait_for(answer, 20)
        await vllm.learner.in_use()
        return samples

    assert len(vllm.run(cancelled())) == 8
    assert vllm.engine.policy_version == vllm.learner.version
    assert vllm.engine.swap_stall_s > 0


def test_c28_weights_whose_logits_are_not_numbers_stop_the_version_by_its_number(vllm: Setup) -> None:
    with torch.no_grad():
        vllm.model.model.layers[0].mlp.up_proj.weight.fill_(3e38)
    vllm.run(vllm.learner.publish(vllm.engine))
    with pytest.raises(NonFiniteLogits, match=f"non-finite logits at version {vllm.learner.version}"):
        vllm.ask(PROMPTS[0])


@pytest.mark.parametrize("swapping", [False, True], ids=["sampling", "swapping"])
def test_c56_a_killed_engine_is_reported_as_dead_and_not_waited_for(vllm: Setup, swapping: bool) -> None:
    if swapping != (vllm.sync.on_update == "recompute"):
        pytest.skip("there is one engine to kill for each")
    (core,) = cores()

    async def kill() -> None:
        answer = asyncio.create_task(
            vllm.engine.generate(prompt(PROMPTS[0], n=8, max_tokens=250), request_id="long", attempt=1)
        )
        with contextlib.suppress(NonFiniteLogits):  # vLLM's cache keeps the NaN of the test before
            await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=2), request_id="short", attempt=1)
        if swapping:
            publication = await vllm.learner.staged(vllm.engine)
            core.suspend()  # so that the swap is under way, for certain
            swap = asyncio.create_task(vllm.engine.swap(publication))
            await asyncio.sleep(0.2)
            assert not swap.done()
            core.kill()
            with pytest.raises(EngineDead):
                await asyncio.wait_for(swap, 20)
        else:
            core.kill()
        await asyncio.wait_for(answer, 20)

    with pytest.raises(EngineDead):
        vllm.run(kill())
    assert not cores()


class _Named(torch.nn.Module):
    """A module whose parameters have exactly these names."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__()
        self._named = parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named)
