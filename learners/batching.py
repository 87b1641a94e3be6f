"""The rows of a batch as the tensors of a micro-batch.

    Batch ─trained_rows─► TrainSequence ─learners/planning.py─► [rank][micro-batch][row] ─collate─► MicroBatch (tensors)

Legend: P prompt tokens, L completion tokens, B rows, K the L of the longest completion. A row enters the model without
its last token, which nothing follows: P + L - 1 positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

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
    """The rows of one forward pass. Column k of a [B, K] tensor belongs to the completion's k-th token.

    Attributes:
        row_ids: of each row, the token ids that enter the model.
        prompt_lengths: P of each row.
        target_ids_BK: the completions, padded on the right.
        loss_columns_N: indices into the flat [B · K] of the tokens that carry loss, or of one token if none does, so
            that every pass has a gradient and all ranks' passes the same collectives.
    """

    row_ids: tuple[Tensor, ...]
    prompt_lengths: tuple[int, ...]
    loss_columns_N: Tensor
    target_ids_BK: Tensor
    mask_BK: Tensor
    behavior_logp_BK: Tensor
    staleness_BK: Tensor
    advantage_B: Tensor
    weight_B: Tensor

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """P + L - 1 of each row."""
        return tuple(len(ids) for ids in self.row_ids)

    def inputs(self, *, packed: bool) -> tuple[Mapping[str, Any], Tensor]:
        """What the model is called with, and [N] where in its flat positions the loss tokens are predicted.

        Packed: all rows one after the other as one row, without padding, with positions that begin anew in each.
        """
        lengths = self.row_lengths
        if packed:
            starts = np.cumsum([0, *lengths[:-1]])
            inputs = _packed(self.row_ids, lengths)
        else:
            starts = np.arange(len(lengths)) * max(lengths)
            # No attention mask: padding is on the right, where causal attention does not look (C30).
            inputs = {
                "input_ids": torch.nn.utils.rnn.pad_sequence(list(self.row_ids), batch_first=True, padding_value=PAD_ID)
            }
        first_B = torch.from_numpy(starts + np.array(self.prompt_lengths) - 1).to(self.mask_BK.device)
        K = self.mask_BK.shape[1]
        rows_N = torch.div(self.loss_columns_N, K, rounding_mode="floor")
        return inputs, first_B[rows_N] + self.loss_columns_N - K * rows_N

    def in_columns(self, values_N: Tensor) -> Tensor:
        """[B, K] the values of the loss tokens, 0 elsewhere."""
        flat = values_N.new_zeros(self.mask_BK.numel())
        return flat.index_put((self.loss_columns_N,), values_N).view(self.mask_BK.shape)

    def part(self, rows: Sequence[int]) -> MicroBatch:
        """Some of its rows; without any, one row that carries no loss. Every tensor named _B or _BK is cut along."""
        if not rows:
            cut = self.part([0])
            return replace(
                cut,
                row_ids=(cut.row_ids[0][:1],),
                prompt_lengths=(1,),
                **{name: value[..., :1] for name, value in _by_row(cut).items() if name.endswith("_BK")}
                | {"mask_BK": torch.zeros_like(cut.mask_BK[:, :1]), "weight_B": torch.zeros_like(cut.weight_B)},
                loss_columns_N=cut.loss_columns_N[:1] * 0,
            )
        index = torch.tensor(rows, device=self.mask_BK.device)
        cut = replace(
            self,
            row_ids=tuple(self.row_ids[i] for i in rows),
            prompt_lengths=tuple(self.prompt_lengths[i] for i in rows),
            **{name: value[index] for name, value in _by_row(self).items()},
        )
        return replace(cut, loss_columns_N=_loss_columns(cut.mask_BK))


def _by_row(batch: MicroBatch) -> dict[str, Any]:
    named = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in named.items() if name.endswith(("_B", "_BK")) and value is not None}


def _loss_columns(mask_BK: Tensor) -> Tensor:
    columns_N = mask_BK.flatten().nonzero().squeeze(-1)
    return columns_N if len(columns_N) else torch.zeros(1, dtype=torch.long, device=mask_BK.device)


def _packed(row_ids: Sequence[Tensor], lengths: Sequence[int]) -> dict[str, Any]:
    """With ``row_lengths`` for the attention of learners/packing.py."""
    positions_N = torch.cat([torch.arange(length) for length in lengths])
    ids_N = torch.cat(list(row_ids))
    return {"input_ids": ids_N[None], "position_ids": positions_N[None].to(ids_N.device), "row_lengths": tuple(lengths)}


def collate(rows: Sequence[TrainSequence], *, device: str = "cpu") -> MicroBatch:
    """Tensors of one micro-batch; without rows, one token that carries no loss."""
    B, K = max(1, len(rows)), max((len(row.completion_ids) for row in rows), default=1)
    target = np.full((B, K), PAD_ID, np.int64)
    mask, behavior = np.zeros((B, K), bool), np.zeros((B, K), np.float32)
    staleness = np.zeros((B, K), np.int64)
    advantage, weight = np.zeros(B, np.float32), np.zeros(B, np.float32)
    for b, row in enumerate(rows):
        L = len(row.completion_ids)
        target[b, :L], mask[b, :L] = row.completion_ids, row.loss_mask
        behavior[b, :L], staleness[b, :L] = row.behavior_logprobs, row.staleness
        advantage[b], weight[b] = row.advantage, row.weight

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    ids = [np.concatenate([row.prompt_ids, row.completion_ids])[:-1].astype(np.int64) for row in rows]
    return MicroBatch(
        row_ids=tuple(tensor(one) for one in ids or [np.full(1, PAD_ID, np.int64)]),
        prompt_lengths=tuple(len(row.prompt_ids) for row in rows) or (1,),
        loss_columns_N=_loss_columns(torch.from_numpy(mask)).to(device),
        target_ids_BK=tensor(target),
        mask_BK=tensor(mask),
        behavior_logp_BK=tensor(behavior),
        staleness_BK=tensor(staleness),
        advantage_B=tensor(advantage),
        weight_B=tensor(weight),
    )
