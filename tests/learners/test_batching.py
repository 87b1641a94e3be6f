"""The tensors of a micro-batch, and what padding and packing must not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learners.batching import TrainSequence, collate
from learners.exchange import MiniBatch, Plan, decode, encode
from learners.logprobs import token_logprobs
from learners.model import load_model
from learners.passes import token_passes


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


def test_columns_of_a_micro_batch_are_the_completion_tokens() -> None:
    batch = collate([row([5, 6, 7], [8, 9]), row([3], [4, 5, 6], [1, 0, 1])])
    assert [ids.tolist() for ids in batch.row_ids] == [[5, 6, 7, 8], [3, 4, 5]]
    assert batch.target_ids_BK.tolist() == [[8, 9, 0], [4, 5, 6]]
    assert batch.mask_BK.int().tolist() == [[1, 1, 0], [1, 0, 1]]
    assert batch.behavior_logp_BK.tolist() == [[-1, -2, 0], [-1, -2, -3]]
    assert batch.staleness_BK.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert (batch.advantage_B.tolist(), batch.weight_B.tolist()) == ([2.0, 2.0], [0.125, 0.125])


def test_loss_tokens_are_predicted_where_the_token_before_them_lies() -> None:
    batch = collate([row([5, 6, 7], [8, 9]), row([3], [4, 5, 6], [1, 0, 1])])
    padded, at_padded_N = batch.inputs(packed=False)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 8], [3, 4, 5, 0]]
    assert at_padded_N.tolist() == [2, 3, 4, 6]
    packed, at_packed_N = batch.inputs(packed=True)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 3, 4, 5]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert (packed["row_lengths"], at_packed_N.tolist()) == ((4, 3), [2, 3, 4, 6])
    assert batch.in_columns(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 0], [3, 0, 4]]


def test_a_micro_batch_without_rows_carries_no_loss() -> None:
    for batch in (collate([]), collate([row([5, 6], [7, 8])]).part([])):
        inputs, at_N = batch.inputs(packed=False)
        assert inputs["input_ids"].numel() == 1
        assert at_N.tolist() == [0]
        assert not batch.mask_BK.any()
        assert batch.target_ids_BK.shape == batch.mask_BK.shape == batch.behavior_logp_BK.shape == (1, 1)


def test_part_of_a_micro_batch_is_that_of_its_rows() -> None:
    rows = [row([5, 6, 7], [8, 9]), row([3], [4, 5, 6], [1, 0, 1]), row([2, 2], [9])]
    part, wanted = collate(rows).part([2, 0]), collate([rows[2], rows[0]])
    for packed in (True, False):
        inputs, at_N = part.inputs(packed=packed)
        other, at_other_N = wanted.inputs(packed=packed)
        assert torch.equal(inputs["input_ids"], other["input_ids"])
        assert torch.equal(at_N, at_other_N)
    assert torch.equal(part.mask_BK[:, :2], wanted.mask_BK)
    assert torch.equal(part.behavior_logp_BK[:, :2], wanted.behavior_logp_BK)


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


@pytest.fixture(scope="module", params=["off", "on"])
def model(model_dir: Path, request: pytest.FixtureRequest) -> torch.nn.Module:
    return load_model(model_dir, attention="sdpa", checkpointing=False, packing=request.param)


def logprobs(model: torch.nn.Module, rows: list[TrainSequence]) -> list[torch.Tensor]:
    batch = collate(rows)
    with torch.no_grad():
        logp_BK, _ = token_passes(model, batch, temperature=1.0)
    return [logp_BK[i][batch.mask_BK[i]] for i in range(len(rows))]


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
