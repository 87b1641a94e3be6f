"""The staleness rule as arithmetic."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from broker.messages import Frontier
from broker.rules import admitted, is_stale, next_training_version, tokens_left, tokens_lost_next

tokens = st.dictionaries(st.integers(0, 9), st.integers(1, 50), max_size=5)


@pytest.mark.parametrize(
    ("holds", "outstanding", "batches_out", "expected"),
    [
        (5, 0, 0, True),
        (4, 0, 0, True),
        (3, 0, 0, False),  # older than the bound
        (4, 0, 1, False),  # trainable now, too old once the batch out is trained
        (6, 0, 1, True),
        (7, 0, 0, False),  # nobody has made it
        (5, 7, 0, True),
        (5, 8, 0, False),  # the window is full
    ],
)
def test_admission_at_version_5_with_bound_1_and_window_8(
    holds: int, outstanding: int, batches_out: int, expected: bool
) -> None:
    assert (
        admitted(
            policy_version=holds,
            version=5,
            batches_out=batches_out,
            outstanding=outstanding,
            max_staleness=1,
            window=8,
        )
        is expected
    )


def test_a_generator_without_weights_is_never_admitted() -> None:
    assert not admitted(policy_version=-1, version=0, batches_out=0, outstanding=0, max_staleness=5, window=8)


@given(tokens, st.integers(0, 12), st.integers(0, 4))
def test_what_is_left_now_is_what_is_left_next_and_what_is_lost(counts: dict[int, int], v: int, eta: int) -> None:
    left = tokens_left(counts, version=v, max_staleness=eta)
    lost = tokens_lost_next(counts, version=v, max_staleness=eta)
    assert left - lost == tokens_left(counts, version=v + 1, max_staleness=eta)


@given(tokens, st.integers(0, 12), st.integers(0, 4))
def test_a_dropped_group_has_an_old_token_and_a_masked_one_only_old_tokens(
    counts: dict[int, int], v: int, eta: int
) -> None:
    old = [sampled for sampled in counts if sampled < v - eta]
    assert is_stale(counts, version=v, max_staleness=eta, on_stale="drop") is bool(old)
    all_old = bool(counts) and len(old) == len(counts)
    assert is_stale(counts, version=v, max_staleness=eta, on_stale="mask") is all_old


def test_each_batch_out_moves_the_next_one_on() -> None:
    assert [next_training_version(7, out) for out in range(3)] == [7, 8, 9]


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_the_frontier_has_exactly_what_has_ended(first: set[int], second: set[int]) -> None:
    frontier = Frontier().with_ended(sorted(first)).with_ended(sorted(second))
    assert [p for p in range(40) if frontier.has(p)] == sorted(first | second)
    assert frontier.base not in frontier.beyond
