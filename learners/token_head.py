"""The output layer of a language model, asked for log-probabilities and entropies instead of logits.

    hidden states ─positions that carry loss─► [N, H] ─a chunk at a time─► logits ─► [N] log-probabilities, entropies

The logits of a chunk are made, read and forgotten, and made again in the backward pass; so neither pass holds more of
them than a chunk. PyTorch's ``linear_cross_entropy`` (2.13) does the same for the log-probability alone: it has neither
the entropy nor a way to share the chunk with it, and it keeps a whole gathered weight of ZeRO-3 alive.

Legend: N tokens, H hidden size, V vocabulary. z: logits at the temperature. p: softmax(z).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Logits at once. On CPU a chunk and its exponentials should stay in the cache; a GPU wants large matrices.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of the hidden states is looked at: ``at_N`` indices into their flat positions, ``target_N`` token ids."""

    at_N: Tensor
    target_N: Tensor
    temperature: float
    entropy_grad: bool


class TokenHead(nn.Linear):
    """A Linear layer; ``asked`` turns what its forward gives into [1, N, 2]: log-probability and entropy."""

    asked_for: Asked | None = None

    @classmethod
    def of(cls, head: nn.Linear) -> TokenHead:
        """The same layer, with the same parameters."""
        made = cls(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        made.weight, made.bias = head.weight, head.bias
        return made

    @contextmanager
    def asked(self, what: Asked) -> Iterator[None]:
        """Within it one forward pass of the model gives what is asked for in the place of its logits."""
        self.asked_for = what
        try:
            yield
        finally:
            self.asked_for = None

    def forward(self, input: Tensor) -> Tensor:
        """Logits, or what is asked for."""
        if (asked := self.asked_for) is None:
            return super().forward(input)
        hidden_NH = input.flatten(0, -2).index_select(0, asked.at_N)
        if torch.is_autocast_enabled(input.device.type):
            hidden_NH = hidden_NH.to(torch.get_autocast_dtype(input.device.type))
        logp_N, entropy_N = chunked_logprobs(
            hidden_NH, self.weight, self.bias, asked.target_N,
            temperature=asked.temperature, entropy_grad=asked.entropy_grad,
        )  # fmt: skip
        return torch.stack((logp_N, entropy_N), -1).unsqueeze(0)


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    *,
    temperature: float,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """[N] log-probabilities of the targets under softmax((hidden · weightᵀ + bias) / temperature), and [N] entropies.

    Both in float32; matrix products in the type of the hidden states. The entropy has a gradient only with
    ``entropy_grad``.
    """
    apply: Any = _ChunkedLogprobs.apply
    logp_N, entropy_N = apply(hidden_NH, weight_VH, bias_V, target_N, temperature, entropy_grad)
    return logp_N, entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = (h · Wᵀ + b) / T and p = softmax(z): ∂logp/∂z = onehot - p, ∂entropy/∂z = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = _Logits(hidden_NH, weight_VH, bias_V, temperature)
        lse_N, chosen_N, entropy_N = (hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in range(3))
        exp_CV = logits.like()
        for part, z_CV in logits.chunks():
            chosen_N[part] = z_CV.gather(-1, target_N[part].unsqueeze(-1)).squeeze(-1)
            top_C = z_CV.amax(-1)
            z_CV.sub_(top_C.unsqueeze(-1))
            e_CV = torch.exp(z_CV, out=exp_CV[: len(z_CV)])
            total_C = e_CV.sum(-1)
            log_total_C = total_C.log()
            lse_N[part] = top_C + log_total_C
            entropy_N[part] = log_total_C - z_CV.mul_(e_CV).sum(-1) / total_C
        ctx.temperature, ctx.entropy_grad = temperature, entropy_grad
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, lse_N, entropy_N)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return chosen_N - lse_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp_N, grad_entropy_N = grads
        hidden_NH, weight_VH, bias_V, target_N, lse_N, entropy_N = ctx.saved_tensors
        logits = _Logits(hidden_NH, weight_VH, bias_V, ctx.temperature)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if wants_bias and bias_V is not None else None
        second_CV = logits.like() if ctx.entropy_grad else None
        for part, z_CV in logits.chunks():
            log_p_CV = z_CV.sub_(lse_N[part].unsqueeze(-1))
            if second_CV is not None:
                p_CV = torch.exp(log_p_CV, out=second_CV[: len(z_CV)])
                slope_CV = log_p_CV.add_(entropy_N[part].unsqueeze(-1)).mul_(grad_entropy_N[part].unsqueeze(-1))
                dz_CV = slope_CV.add_(grad_logp_N[part].unsqueeze(-1)).mul_(p_CV).neg_()
            else:
                dz_CV = log_p_CV.exp_().mul_(-grad_logp_N[part].unsqueeze(-1))
            dz_CV.scatter_add_(-1, target_N[part].unsqueeze(-1), grad_logp_N[part].unsqueeze(-1))
            if grad_bias_V is not None:
                grad_bias_V += dz_CV.sum(0) / ctx.temperature
            dz_CV = dz_CV.to(hidden_NH.dtype)
            torch.mm(dz_CV, logits.weight_VH, out=grad_hidden_NH[part])
            if grad_weight_VH is None:
                continue
            if grad_weight_VH.dtype is dz_CV.dtype:
                grad_weight_VH.addmm_(dz_CV.T, logits.scaled_NH[part])
            else:
                grad_weight_VH += torch.mm(dz_CV.T, logits.scaled_NH[part])
        return grad_hidden_NH / ctx.temperature, grad_weight_VH, grad_bias_V, None, None, None


class _Logits:
    """The logits of a bounded number of tokens at a time, at the temperature, in float32, always in the same memory."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> None:
        self.scaled_NH, self.weight_VH = hidden_NH / temperature, weight_VH.to(hidden_NH.dtype)
        self._bias_V = None if bias_V is None else bias_V / temperature
        V = len(weight_VH)
        self._size = max(1, min(len(hidden_NH), CHUNK_ELEMENTS.get(hidden_NH.device.type, CHUNK_ELEMENTS["cuda"]) // V))
        self._in_place = hidden_NH.dtype is torch.float32
        self._memory_CV = self.like()

    def like(self) -> Tensor:
        """Room for a chunk."""
        return torch.empty((self._size, len(self.weight_VH)), device=self.weight_VH.device)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Which tokens, and their [C, V] logits, which may be written to and are valid until the next."""
        for start in range(0, len(self.scaled_NH), self._size):
            part = slice(start, min(start + self._size, len(self.scaled_NH)))
            room_CV = self._memory_CV[: part.stop - start]
            if self._in_place:
                torch.mm(self.scaled_NH[part], self.weight_VH.T, out=room_CV)
            else:
                room_CV.copy_(F.linear(self.scaled_NH[part], self.weight_VH))
            yield part, room_CV if self._bias_V is None else room_CV.add_(self._bias_V)
