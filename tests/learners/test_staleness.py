"""The bound: what is masked, what is counted, and what is fatal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.messages import Batch, Completion, Group, Prompt, Split
from learners.staleness import BoundViolated, apply_bound


def masks(batch: Batch) -> list[list[int]]:
    return [one.loss_mask.tolist() for group in batch.groups for one in group.completions]


def test_tokens_older_than_the_bound_are_context_only_and_are_counted(make: dict[str, Callable[..., Any]]) -> None:
    group = make["group"]([make["completion"]([1, 1, 3, 4]), make["completion"]([4, 4])])
    bounded, staleness = apply_bound(make["batch"]([group], version=5), version=5, max_staleness=2, on_stale="mask")
    assert masks(bounded) == [[0, 0, 1, 1], [1, 1]]
    assert (staleness.tokens, staleness.masked, staleness.oldest) == (4, 2, 2)
    assert staleness.masked_share == pytest.approx(1 / 3)


def test_a_completion_that_is_all_too_old_stays_in_its_group_for_the_baseline(
    make: dict[str, Callable[..., Any]],
) -> None:
    group = make["group"]([make["completion"]([1, 1], reward=1.0), make["completion"]([5, 5])])
    bounded, _ = apply_bound(make["batch"]([group], version=5), version=5, max_staleness=0, on_stale="mask")
    assert masks(bounded) == [[0, 0], [1, 1]]
    assert [one.reward for one in bounded.groups[0].completions] == [1.0, 0.0]


def test_dropping_takes_the_loss_from_the_whole_group_and_from_no_other(make: dict[str, Callable[..., Any]]) -> None:
    old, fresh = make["group"]([make["completion"]([1, 5])]), make["group"]([make["completion"]([5, 5])], position=1)
    bounded, staleness = apply_bound(
        make["batch"]([old, fresh], version=5), version=5, max_staleness=1, on_stale="drop"
    )
    assert masks(bounded) == [[0, 0], [1, 1]]
    assert staleness.masked == 2


def test_inserted_tokens_have_no_loss_and_no_staleness(make: dict[str, Callable[..., Any]]) -> None:
    group = make["group"]([make["completion"]([0, 0, 5], mask=[0, 0, 1])])
    bounded, staleness = apply_bound(make["batch"]([group], version=5), version=5, max_staleness=1, on_stale="mask")
    assert masks(bounded) == [[0, 0, 1]]
    assert (staleness.tokens, staleness.masked, staleness.oldest) == (1, 0, 0)


def test_c35_staleness_is_per_token_and_its_mean_is_weighted_by_tokens(make: dict[str, Callable[..., Any]]) -> None:
    group = make["group"]([make["completion"]([3] * 5 + [5] * 5)])
    _, staleness = apply_bound(make["batch"]([group], version=5), version=5, max_staleness=2, on_stale="mask")
    assert (staleness.oldest, staleness.mean) == (2, 1.0)
    assert dict(staleness.histogram) == {0: 5, 2: 5}


def test_a_token_of_a_version_that_the_learner_has_not_reached_is_fatal(make: dict[str, Callable[..., Any]]) -> None:
    group = make["group"]([make["completion"]([5, 6])])
    with pytest.raises(BoundViolated, match=r"versions \[6\].*rollout.max_staleness = 1"):
        apply_bound(make["batch"]([group], version=5), version=5, max_staleness=1, on_stale="mask")


@settings(max_examples=50, deadline=None)
@given(
    versions=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=5),
    max_staleness=st.integers(0, 8),
    on_stale=st.sampled_from(["mask", "drop"]),
)
def test_no_token_older_than_the_bound_ever_carries_loss(
    versions: list[list[int]], max_staleness: int, on_stale: str
) -> None:
    prompt = Prompt(
        item="0", position=0, epoch=0, split=Split.TRAIN, token_ids=np.zeros(1, np.int32), text="", reference="",
        n=1, temperature=1.0, max_tokens=1, seed=0,
    )  # fmt: skip
    completions = tuple(
        Completion(
            token_ids=np.zeros(len(row), np.int32), behavior_logprobs=np.zeros(len(row), np.float32),
            loss_mask=np.ones(len(row), np.uint8), version_runs=np.array([[v, 1] for v in row], np.int32),
            finish_reason="stop", reward=0.0, reward_parts={}, text="",
        )
        for row in versions
    )  # fmt: skip
    group = Group(
        lease_id="l", prompt=prompt, generator="g", incarnation=0, completions=completions, failed_completions=0,
        generation_s=0.0,
    )  # fmt: skip
    batch = Batch(batch_id="0.7", version=7, incarnation=0, groups=(group,), ended=())
    bounded, staleness = apply_bound(batch, version=7, max_staleness=max_staleness, on_stale=on_stale)
    for row, mask in zip(versions, masks(bounded), strict=True):
        assert all(7 - version <= max_staleness for version, carries in zip(row, mask, strict=True) if carries)
    assert staleness.tokens == sum(map(sum, masks(bounded)))
    assert staleness.tokens + staleness.masked == sum(map(len, versions))
