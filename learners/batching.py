"""From the rows of a batch to the micro-batches of every rank.

    Batch ─trained_rows─► TrainSequence ─plan─► [rank][micro-batch][row] ─collate─► MicroBatch (tensors)

Legend: P prompt tokens, L completion tokens, B rows, T model positions, K positions from the first that predicts a
completion token. Every rank gets the same number of micro-batches, because a ZeRO-3 rank that has fewer leaves the
others waiting in a gather (C100); what is missing is filled with micro-batches without loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from broker.messages import Float32Array, Int32Array, UInt8Array

PAD_ID = 0  # any id will do: rows are padded on the right, where causal attention never looks, and carry no loss (C82)


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One completion to train on, in context. ``prompt_ids`` [P], the other arrays [L].

    ``staleness`` of each token is in learner steps; ``advantage`` is the reward under ``advantage: gae``, where each
    token gets one of its own later; ``weight`` is what its loss tokens weigh in the loss of an optimizer step;
    ``index`` its completion's place in the batch, over all groups.
    """

    prompt_ids: Int32Array
    completion_ids: Int32Array
    loss_mask: UInt8Array
    behavior_logprobs: Float32Array
    staleness: Int32Array
    advantage: float
    weight: float
    index: int = 0

    def __len__(self) -> int:
        """P + L."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes. Column k of the [B, K] tensors predicts position T - K + k + 1 of the row.

    Attributes:
        input_ids_BT: rows without their last token, padded on the right.
        target_ids_BK: the token that follows each of the last K positions.
    """

    input_ids_BT: Tensor
    target_ids_BK: Tensor
    mask_BK: Tensor
    behavior_logp_BK: Tensor
    staleness_BK: Tensor
    advantage_B: Tensor
    weight_B: Tensor


def plan(lengths: Sequence[int], *, ranks: int, token_budget: int) -> list[list[list[int]]]:
    """[rank][micro-batch][row] indices into ``lengths``: equally many micro-batches on every rank, as few as the
    budget of padded tokens allows, and with the largest one as small as possible. A row over the budget is alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [lengths[i] for i in order]
    ceiling = max(token_budget, max(sizes, default=0))
    per_rank = max(1, -(-len(_cut(sizes, ceiling)) // ranks))
    bins = [[order[i] for i in part] for part in _cut(sizes, _smallest_cap(sizes, per_rank * ranks))]
    bins += [[] for _ in range(per_rank * ranks - len(bins))]
    bins.sort(key=lambda rows: -_padded(rows, lengths))
    planned: list[list[list[int]]] = [[] for _ in range(ranks)]
    for i in range(0, len(bins), ranks):  # the i-th of every rank are of like size; who gets the largest alternates
        planned.sort(key=lambda mine: sum(_padded(rows, lengths) for rows in mine))
        for mine, rows in zip(planned, bins[i : i + ranks], strict=True):
            mine.append(rows)
    return planned


def plan_pairs(lengths: Sequence[int], *, ranks: int, token_budget: int) -> list[list[list[int]]]:
    """``plan`` where rows 2 i and 2 i + 1 stay together, in this order."""
    longest = [max(pair) for pair in zip(lengths[0::2], lengths[1::2], strict=True)]
    planned = plan(longest, ranks=ranks, token_budget=max(1, token_budget // 2))
    return [[[row for i in pairs for row in (2 * i, 2 * i + 1)] for pairs in mine] for mine in planned]


def padding_share(planned: list[list[list[int]]], lengths: Sequence[int]) -> float:
    """Share of the padded tokens that are padding."""
    padded = sum(_padded(rows, lengths) for mine in planned for rows in mine)
    return 1 - sum(lengths) / padded if padded else 0.0


def _padded(rows: list[int], lengths: Sequence[int]) -> int:
    return len(rows) * max((lengths[i] for i in rows), default=0)


def _cut(sizes: Sequence[int], cap: int) -> list[range]:
    """Cuts descending sizes into runs of at most ``cap`` padded tokens each, as few as possible."""
    runs, start = [], 0
    while start < len(sizes):
        stop = min(len(sizes), start + max(1, cap // sizes[start]))
        runs.append(range(start, stop))
        start = stop
    return runs


def _smallest_cap(sizes: Sequence[int], most_runs: int) -> int:
    """The smallest cap under which ``_cut`` needs at most ``most_runs`` runs."""
    low, high = 1, max(1, len(sizes) * max(sizes, default=1))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(sizes, middle)) <= most_runs else (middle + 1, high)
    return low


def collate(rows: Sequence[TrainSequence], *, device: str = "cpu") -> MicroBatch:
    """Tensors of one micro-batch; without rows, one token that carries no loss."""
    T = max((len(row) for row in rows), default=2) - 1
    first = min((len(row.prompt_ids) for row in rows), default=1) - 1
    B, K = max(1, len(rows)), T - first
    ids = np.full((B, T + 1), PAD_ID, np.int64)
    mask, behavior = np.zeros((B, K), bool), np.zeros((B, K), np.float32)
    staleness = np.zeros((B, K), np.int64)
    advantage, weight = np.zeros(B, np.float32), np.zeros(B, np.float32)
    for b, row in enumerate(rows):
        P, L = len(row.prompt_ids), len(row.completion_ids)
        ids[b, :P], ids[b, P : P + L] = row.prompt_ids, row.completion_ids
        columns = slice(P - 1 - first, P - 1 - first + L)
        mask[b, columns], behavior[b, columns] = row.loss_mask, row.behavior_logprobs
        staleness[b, columns] = row.staleness
        advantage[b], weight[b] = row.advantage, row.weight

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        input_ids_BT=tensor(ids[:, :T]),
        target_ids_BK=tensor(ids[:, first + 1 :]),
        mask_BK=tensor(mask),
        behavior_logp_BK=tensor(behavior),
        staleness_BK=tensor(staleness),
        advantage_B=tensor(advantage),
        weight_B=tensor(weight),
    )
