"""From groups to balanced micro-batches, and what padding must not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.batching import TrainSequence, collate, padding_share, plan, plan_pairs
from learners.exchange import MiniBatch, Plan, decode, encode
from learners.logprobs import token_logprobs
from learners.model import load_model


def row(prompt: list[int], completion: list[int], mask: list[int] | None = None) -> TrainSequence:
    return TrainSequence(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        loss_mask=np.array(mask or [1] * len(completion), np.uint8),
        behavior_logprobs=-np.arange(1, len(completion) + 1, dtype=np.float32),
        staleness=np.arange(len(completion), dtype=np.int32),
        advantage=2.0,
        weight=0.125,
        index=len(prompt) + len(completion),
    )


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


def test_columns_of_a_micro_batch_predict_the_completion_tokens() -> None:
    batch = collate([row([5, 6, 7], [8, 9]), row([3], [4, 5, 6], [1, 0, 1])])
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [3, 4, 5, 6]]
    assert batch.target_ids_BK.tolist() == [[6, 7, 8, 9], [4, 5, 6, 0]]
    assert batch.mask_BK.int().tolist() == [[0, 0, 1, 1], [1, 0, 1, 0]]
    assert batch.behavior_logp_BK.tolist() == [[0, 0, -1, -2], [-1, -2, -3, 0]]
    assert batch.staleness_BK.tolist() == [[0, 0, 0, 1], [0, 1, 2, 0]]
    assert (batch.advantage_B.tolist(), batch.weight_B.tolist()) == ([2.0, 2.0], [0.125, 0.125])


def test_positions_before_the_first_completion_are_not_computed() -> None:
    batch = collate([row([5, 6, 7, 8], [9, 10]), row([5, 6, 7], [8])])
    assert batch.target_ids_BK.shape == (2, 3)
    assert batch.mask_BK.int().tolist() == [[0, 1, 1], [1, 0, 0]]


def test_a_micro_batch_without_rows_carries_no_loss() -> None:
    batch = collate([])
    assert batch.input_ids_BT.numel() == 1
    assert not batch.mask_BK.any()


def test_a_plan_survives_the_wire_and_each_rank_reads_its_share() -> None:
    rows = [row([5, 6], [7]), row([3], [4, 5])]
    parts = [
        MiniBatch(denominator=1, micro_batches=[[[rows[0]]], [[]]]),
        MiniBatch(denominator=2, micro_batches=[[[], []], [[rows[1]], []]]),
    ]
    share = decode(encode(Plan(mini_batches=parts, order=[1, 0, 0, 1], completions=5)), 1)
    assert (share.loss_tokens, share.order, share.completions) == (3, [1, 0, 0, 1], 5)
    assert [(one.denominator, [*map(len, one.micro_batches)]) for one in share.mini_batches] == [(1, [0]), (2, [1, 0])]
    got = share.mini_batches[1].micro_batches[0][0]
    assert got.completion_ids.tolist() == [4, 5]
    assert got.behavior_logprobs.tolist() == [-1.0, -2.0]
    assert (got.prompt_ids.tolist(), got.loss_mask.tolist(), got.staleness.tolist()) == ([3], [1, 1], [0, 1])
    assert (got.advantage, got.weight, got.index) == (2.0, 0.125, 3)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return load_model(model_dir, attention="sdpa", checkpointing=False)


def logprobs(model: torch.nn.Module, rows: list[TrainSequence]) -> list[torch.Tensor]:
    batch = collate(rows)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids_BT, logits_to_keep=batch.target_ids_BK.shape[1]).logits
    logp = token_logprobs(logits, batch.target_ids_BK, temperature=1.0)
    return [logp[i][batch.mask_BK[i]] for i in range(len(rows))]


@pytest.mark.parametrize("padding", [0, 3, 60])
def test_c30_logprobs_do_not_depend_on_padding(model: torch.nn.Module, padding: int) -> None:
    short = row([5, 6, 7], [8, 9, 10, 11])
    alone = logprobs(model, [short])[0]
    longer = row([5, 6, 7], [3 + i % 60 for i in range(4 + padding)])
    beside = logprobs(model, [short, longer])[0]
    assert (alone - beside).abs().max() < 1e-4


@pytest.mark.parametrize("padding", [0, 3, 60])
def test_c30_logprobs_are_those_of_a_left_padded_row_with_positions_of_its_own(
    model: torch.nn.Module, padding: int
) -> None:
    ids = [5, 6, 7, 8, 9, 10, 11]
    padded = torch.tensor([[0] * padding + ids])
    mask = torch.tensor([[0] * padding + [1] * len(ids)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    left = token_logprobs(logits[:, :-1], padded[:, 1:], temperature=1.0)[0, -4:]
    assert (left - logprobs(model, [row(ids[:3], ids[3:])])[0]).abs().max() < 1e-4


def test_c82_the_padding_id_is_ours_and_a_model_without_one_trains_the_same(model: torch.nn.Module) -> None:
    rows = [row([5, 6, 7], [2]), row([5], list(range(3, 23)))]
    assert model.config.pad_token_id is None
    assert (logprobs(model, rows)[0] - logprobs(model, rows[:1])[0]).abs().max() < 1e-4  # the end token is learned
