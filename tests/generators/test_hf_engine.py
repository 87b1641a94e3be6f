import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.config import RolloutConfig
from generators.config import GeneratorConfig
from generators.engine import EngineDead, NonFiniteLogits
from generators.hf_engine import HfEngine
from tests.generators.learner_end import EOS, Learner, greedy, logprobs, prompt, qwen
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import LayoutRefused, SyncFailed

PROMPTS = [[2, 5 + i, 6, 7 + i, 8] for i in range(8)]
SYNC = WeightsSyncConfig(sync_timeout_s=10.0, on_update="recompute")


class Setup:
    """An engine with the learner's version 0 in use, both on one event loop."""

    def __init__(self, directory: Path, tied: bool, sync: WeightsSyncConfig) -> None:
        self.model = qwen(tied)
        self.model.save_pretrained(directory)
        self.engine = HfEngine(
            model_path=str(directory),
            rollout=RolloutConfig(max_prompt_length=256, max_response_length=256),
            config=GeneratorConfig(engine="transformers"),
            sync=sync,
            dtype="float32",
            seed=0,
        )
        self.learner = Learner(self.model, sync)
        self.runner = asyncio.Runner()
        self.run(self.engine.start())
        self.learner.step()
        self.run(self.learner.publish(self.engine))

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def close(self) -> None:
        self.run(self.engine.close())
        self.learner.publisher.close()
        self.runner.close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    started: list[Setup] = []

    def start(tied: bool = True, sync: WeightsSyncConfig = SYNC) -> Setup:
        started.append(Setup(tmp_path, tied, sync))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize("tied", [True, False])
def test_c12_c13_greedy_answers_follow_the_published_weights(setup: Callable[..., Setup], tied: bool) -> None:
    s = setup(tied)
    for version in (1, 2):
        s.learner.step()
        s.run(s.learner.publish(s.engine))
        assert s.engine.policy_version == version
        for ids, wanted in zip(PROMPTS, greedy(s.model, PROMPTS, 32), strict=True):
            (sample,) = s.run(s.engine.generate(prompt(ids, temperature=0.0), request_id="r", attempt=1))
            assert sample.token_ids.tolist() == wanted
            assert sample.version_runs.tolist() == [[version, len(sample.token_ids)]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_c24_logprobs_are_those_of_the_sampling_temperature(setup: Callable[..., Setup], temperature: float) -> None:
    s = setup()
    for sample in s.run(s.engine.generate(prompt(PROMPTS[0], n=8, temperature=temperature), request_id="r", attempt=1)):
        wanted = logprobs(s.model, PROMPTS[0], sample.token_ids.tolist(), temperature)
        np.testing.assert_allclose(sample.behavior_logprobs, wanted, atol=1e-5)


def test_the_same_seed_and_attempt_give_the_same_answer_whatever_else_runs(setup: Callable[..., Setup]) -> None:
    s = setup()
    alone = s.engine.generate_now(prompt(PROMPTS[0], n=4), 1)

    async def crowd() -> Any:
        return await asyncio.gather(
            *(s.engine.generate(prompt(ids, n=4), request_id=f"r{i}", attempt=1) for i, ids in enumerate(PROMPTS))
        )

    together = s.run(crowd())[0]
    assert [x.token_ids.tolist() for x in alone] == [x.token_ids.tolist() for x in together]
    other = s.engine.generate_now(prompt(PROMPTS[0], n=4), 2)
    assert [x.token_ids.tolist() for x in alone] != [x.token_ids.tolist() for x in other]
    assert len({tuple(x.token_ids.tolist()) for x in alone}) == 4


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_c40_a_running_answer_goes_on_over_a_swap_with_the_version_of_every_token(
    setup: Callable[..., Setup], on_update: str
) -> None:
    s = setup(sync=SYNC.model_copy(update={"on_update": on_update}))
    before = {name: value.clone() for name, value in s.model.state_dict().items()}

    async def swap_meanwhile() -> Any:
        long = prompt(PROMPTS[0], n=4, max_tokens=250)
        answer = asyncio.create_task(s.engine.generate(long, request_id="long", attempt=1))
        await asyncio.sleep(0)  # lets the request reach the engine before the new version does
        s.learner.step()
        await s.learner.publish(s.engine)
        return await answer

    samples = s.run(swap_meanwhile())
    old = qwen(True)
    old.load_state_dict(before)
    crossed = [sample for sample in samples if len(sample.version_runs) == 2]
    assert crossed
    for sample in crossed:
        (first, cut), (second, rest) = sample.version_runs.tolist()
        tokens = sample.token_ids.tolist()
        assert (first, second) == (0, 1) and cut + rest == len(tokens)
        was = logprobs(old, PROMPTS[0], tokens, 1.0)
        now = logprobs(s.model, PROMPTS[0], tokens, 1.0)
        np.testing.assert_allclose(sample.behavior_logprobs[:cut], was[:cut], atol=1e-5)
        if on_update == "recompute":
            np.testing.assert_allclose(sample.behavior_logprobs[cut:], now[cut:], atol=1e-5)
        assert np.abs(was[cut:] - now[cut:]).max() > 1e-3


def test_c21_a_repeated_prompt_meets_no_cache_of_an_older_version(setup: Callable[..., Setup]) -> None:
    s = setup()
    for attempt in (1, 2):
        (sample,) = s.run(s.engine.generate(prompt(PROMPTS[0] * 40), request_id=f"r{attempt}", attempt=attempt))
        wanted = logprobs(s.model, PROMPTS[0] * 40, sample.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(sample.behavior_logprobs, wanted, atol=1e-5)
        s.learner.step()
        s.run(s.learner.publish(s.engine))


def test_c28_weights_whose_logits_are_not_numbers_stop_the_version_by_its_number(setup: Callable[..., Setup]) -> None:
    """Finite ones, each: others are not sent at all."""
    s = setup()
    with torch.no_grad():
        s.model.model.layers[0].mlp.up_proj.weight.fill_(3e38)
    s.run(s.learner.publish(s.engine))
    with pytest.raises(NonFiniteLogits, match="non-finite logits at version 1"):
        s.run(s.engine.generate(prompt(PROMPTS[0]), request_id="r", attempt=1))


def test_c23_an_unknown_name_leaves_the_old_version_serving(setup: Callable[..., Setup]) -> None:
    s = setup()
    answer = s.engine.generate_now(prompt(PROMPTS[0]), 1)[0].token_ids.tolist()
    odd = torch.nn.ModuleDict({"odd": torch.nn.Linear(2, 2)})
    learner = Learner(odd, SYNC)
    learner.version = 0
    learner.publisher.offer(1, odd.named_parameters())

    async def stage() -> None:
        await s.engine.stage(await learner.announced(1), member_id="g1")

    with pytest.raises(SyncFailed, match=r"unknown: odd\.bias, odd\.weight; missing: model\.embed_tokens\.weight"):
        s.run(stage())
    learner.publisher.close()
    assert s.engine.policy_version == 0
    assert s.engine.generate_now(prompt(PROMPTS[0]), 1)[0].token_ids.tolist() == answer


def test_c13_a_tied_engine_refuses_an_untied_learner(setup: Callable[..., Setup]) -> None:
    s = setup(tied=True)
    with pytest.raises(LayoutRefused, match=r"unknown: lm_head\.weight"):
        s.engine.load_weights(1, [*qwen(False).named_parameters()][::-1])


def test_load_weights_leaves_everything_as_it_was_when_a_tensor_is_missing(setup: Callable[..., Setup]) -> None:
    s = setup()
    before = s.engine.generate_now(prompt(PROMPTS[0]), 1)[0].token_ids.tolist()
    s.learner.step()
    with pytest.raises(LayoutRefused, match=r"missing: model\.norm\.weight"):
        s.engine.load_weights(9, [(n, p) for n, p in s.model.named_parameters() if n != "model.norm.weight"])
    assert s.engine.policy_version == 0
    assert s.engine.generate_now(prompt(PROMPTS[0]), 1)[0].token_ids.tolist() == before
    s.engine.load_weights(9, s.model.named_parameters())
    assert (
        s.engine.generate_now(prompt(PROMPTS[0], temperature=0.0), 1)[0].token_ids.tolist()
        == greedy(s.model, PROMPTS[:1], 32)[0]
    )


def test_an_aborted_answer_comes_back_with_what_there_is(setup: Callable[..., Setup]) -> None:
    s = setup()

    async def abort() -> Any:
        answer = asyncio.create_task(
            s.engine.generate(prompt(PROMPTS[0], n=3, max_tokens=500), request_id="long", attempt=1)
        )
        await asyncio.sleep(0)
        await s.engine.generate(prompt(PROMPTS[1], max_tokens=3, seed=1), request_id="s", attempt=1)
        await s.engine.abort("long")
        return await answer

    samples = s.run(abort())
    assert "abort" in {sample.finish_reason for sample in samples}
    for sample in samples:
        lengths = {len(sample.token_ids), len(sample.behavior_logprobs), int(sample.version_runs[:, 1].sum())}
        assert len(lengths) == 1 and 0 < lengths.pop() < 500


def test_an_answer_ends_with_the_stop_token_or_at_its_length(setup: Callable[..., Setup]) -> None:
    s = setup()
    samples = s.run(s.engine.generate(prompt(PROMPTS[0], n=32, max_tokens=20), request_id="r", attempt=1))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        tokens = sample.token_ids.tolist()
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (sample.finish_reason == "stop")
        assert len(tokens) == 20 or sample.finish_reason == "stop"


def test_a_closed_engine_says_so(setup: Callable[..., Setup]) -> None:
    s = setup()
    s.run(s.engine.close())
    with pytest.raises(EngineDead, match="closed"):
        s.run(s.engine.generate(prompt(PROMPTS[0]), request_id="r", attempt=1))
