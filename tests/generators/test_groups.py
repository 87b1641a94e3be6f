from __future__ import annotations

import numpy as np
import pytest

from broker.messages import Lease, Prompt, Split
from generators.engine import NonFiniteLogits, Sample
from generators.groups import GroupFailed, build_group, decoder, finished
from generators.scoring import Score
from tasks.tiny_model import character_tokenizer


def lease(n: int) -> Lease:
    prompt = Prompt(
        item="3",
        position=3,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.zeros(1, np.int32),
        text="",
        reference="",
        n=n,
        temperature=1.0,
        max_tokens=8,
        seed=0,
    )
    return Lease(lease_id="l", prompt=prompt, attempt=1, incarnation=2)


def sample(*token_ids: int, finish: str = "stop", logprob: float = -1.0) -> Sample:
    return Sample(
        token_ids=np.array(token_ids, np.int64),
        behavior_logprobs=np.full(len(token_ids), logprob),
        version_runs=np.array([[4, len(token_ids)]]),
        finish_reason=finish,
    )


def score(reward: float) -> Score:
    return Score(reward=reward, parts={"part": reward})


def test_tokens_mask_logprobs_and_versions_of_a_completion_have_one_length_and_the_wire_types() -> None:
    group = build_group(
        lease=lease(2),
        samples=[sample(5, 6, 1), sample(7)],
        texts=["ab", "c"],
        scores=[score(1.0), score(0.5)],
        generator="g",
        generation_s=2.0,
    )
    assert (group.incarnation, group.failed_completions, group.generator) == (2, 0, "g")
    for completion in group.completions:
        arrays = (completion.token_ids, completion.behavior_logprobs, completion.loss_mask, completion.versions())
        assert {len(array) for array in arrays} == {len(completion.token_ids)}
        assert [array.dtype for array in arrays] == [np.int32, np.float32, np.uint8, np.int32]
        assert completion.loss_mask.all()
    assert [c.reward for c in group.completions] == [1.0, 0.5]
    assert [c.reward_parts for c in group.completions] == [{"part": 1.0}, {"part": 0.5}]


@pytest.mark.parametrize(("n", "scored", "enough"), [(4, 2, True), (4, 1, False), (1, 1, True), (1, 0, False)])
def test_a_group_needs_two_completions_or_the_one_that_was_asked_for(n: int, scored: int, enough: bool) -> None:
    def build() -> int:
        scores = [score(1.0) if i < scored else None for i in range(n)]
        group = build_group(
            lease=lease(n), samples=[sample(5)] * n, texts=[""] * n, scores=scores, generator="g", generation_s=0.0
        )
        return group.failed_completions

    if enough:
        assert build() == n - scored
    else:
        with pytest.raises(GroupFailed, match=f"{scored} of {n} completions"):
            build()


def test_aborted_samples_are_left_out_but_their_garbage_is_still_seen() -> None:
    kept = finished([sample(5), sample(6, finish="abort"), sample(7, finish="length")])
    assert [s.token_ids.tolist() for s in kept] == [[5], [7]]
    with pytest.raises(NonFiniteLogits, match="version 4"):
        finished([sample(5), sample(6, finish="abort", logprob=float("nan"))])


def test_c84_text_loses_the_token_that_ended_it_and_nothing_else() -> None:
    decode = decoder(character_tokenizer())
    assert decode(sample(11, 4, 8, 1)) == "704"
    assert decode(sample(11, 4, 8, finish="length")) == "704"
    assert decode(sample(11, 0, 4, 1)) == "7<pad>0"
    assert decode(sample(1)) == ""
