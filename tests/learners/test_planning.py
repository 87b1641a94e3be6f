"""Which rows go into which micro-batch of which rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.planning import cost, padding_share, plan, plan_pairs


@given(lengths=st.lists(st.integers(1, 300), max_size=40), ranks=st.integers(1, 4), token_budget=st.integers(1, 2000))
def test_c100_every_rank_gets_equally_many_micro_batches_and_every_row_once(
    lengths: list[int], ranks: int, token_budget: int
) -> None:
    planned = plan(lengths, ranks=ranks, token_budget=token_budget)
    assert len({len(mine) for mine in planned}) == 1
    assert sorted(i for mine in planned for rows in mine for i in rows) == list(range(len(lengths)))
    for rows in (rows for mine in planned for rows in mine if len(rows) > 1):
        assert len(rows) * max(lengths[i] for i in rows) <= max(token_budget, max(lengths))


def test_c100_skewed_lengths_are_spread_evenly() -> None:
    lengths = [900, 100] + [100] * 10
    planned = plan(lengths, ranks=2, token_budget=1000)
    tokens = [sum(len(rows) * max(lengths[i] for i in rows) for rows in mine if rows) for mine in planned]
    assert [len(mine) for mine in planned] == [2, 2] or [len(mine) for mine in planned] == [1, 1]
    assert max(tokens) <= 1200


@given(lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=20), ranks=st.integers(1, 4))
def test_c100_pairs_stay_together_and_every_rank_gets_equally_many_micro_batches(
    lengths: list[tuple[int, int]], ranks: int
) -> None:
    planned = plan_pairs([one for pair in lengths for one in pair], ranks=ranks, token_budget=500)
    assert len({len(mine) for mine in planned}) == 1
    seen = [rows for mine in planned for rows in mine]
    assert sorted(i for rows in seen for i in rows) == list(range(2 * len(lengths)))
    assert all(second == first + 1 for rows in seen for first, second in zip(rows[0::2], rows[1::2], strict=True))
    assert all(first % 2 == 0 for rows in seen for first in rows[0::2])


def test_a_step_that_fits_is_one_micro_batch_a_rank() -> None:
    planned = plan([12] * 128, ranks=2, token_budget=4096)
    assert [[len(rows) for rows in mine] for mine in planned] == [[64], [64]]
    assert padding_share(planned, [12] * 128) == 0.0


def test_padding_share_counts_padded_tokens() -> None:
    assert padding_share([[[0, 1]]], [10, 5]) == pytest.approx(0.25)
    assert padding_share([[[]]], []) == 0.0


@given(lengths=st.lists(st.integers(1, 300), max_size=40), ranks=st.integers(1, 4), token_budget=st.integers(1, 2000))
def test_c100_packed_rows_fill_equally_many_micro_batches_within_the_budget(
    lengths: list[int], ranks: int, token_budget: int
) -> None:
    planned = plan(lengths, ranks=ranks, token_budget=token_budget, packed=True)
    assert len({len(mine) for mine in planned}) == 1
    assert sorted(i for mine in planned for rows in mine for i in rows) == list(range(len(lengths)))
    for rows in (rows for mine in planned for rows in mine if len(rows) > 1):
        assert sum(lengths[i] for i in rows) <= max(token_budget, max(lengths))


@given(lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=20), ranks=st.integers(1, 4))
def test_c100_packed_pairs_stay_together(lengths: list[tuple[int, int]], ranks: int) -> None:
    planned = plan_pairs([one for pair in lengths for one in pair], ranks=ranks, token_budget=500, packed=True)
    assert len({len(mine) for mine in planned}) == 1
    seen = [rows for mine in planned for rows in mine]
    assert sorted(i for rows in seen for i in rows) == list(range(2 * len(lengths)))
    assert all(second == first + 1 for rows in seen for first, second in zip(rows[0::2], rows[1::2], strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_c100_micro_batches_that_run_at_the_same_time_cost_nearly_the_same(seed: int) -> None:
    lengths = np.clip(np.random.default_rng(seed).lognormal(6.0, 1.0, 256), 20, 4000).astype(int).tolist()
    for packed, spread in ((True, 1.03), (False, 1.3)):
        planned = plan(lengths, ranks=4, token_budget=16384, packed=packed)
        together = [
            [sum(cost(lengths[i] if packed else max(lengths[j] for j in rows)) for i in rows) for rows in step]
            for step in zip(*planned, strict=True)
        ]
        assert sum(map(max, together)) < spread * sum(map(sum, together)) / 4
    assert len(plan(lengths, ranks=4, token_budget=16384, packed=True)[0]) == -(-sum(lengths) // (4 * 16384))


def test_packed_rows_are_never_padding() -> None:
    planned = plan([10, 5], ranks=1, token_budget=100, packed=True)
    assert padding_share(planned, [10, 5], packed=True) == 0.0
