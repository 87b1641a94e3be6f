"""From logits to log-probabilities and entropies. Legend: B rows, T positions, V vocabulary, N = B T. z: logits."""

from __future__ import annotations

import torch
from torch import Tensor

_ENTROPY_ELEMENTS = 1 << 22  # logits turned into probabilities at once


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor, *, temperature: float) -> Tensor:
    """[B, T] log-probability of each token under softmax(z / temperature), the distribution it was sampled from (C24).

    z_token - logsumexp(z) needs no table of log-probabilities beside the logits.
    """
    scaled_BTV = scale(logits_BTV, temperature)
    chosen_BT = scaled_BTV.gather(-1, token_ids_BT.unsqueeze(-1)).squeeze(-1)
    return chosen_BT - scaled_BTV.logsumexp(-1)


def scale(logits_BTV: Tensor, temperature: float) -> Tensor:
    """Logits at ``temperature`` in float32; no copy at temperature 1."""
    logits_BTV = logits_BTV.float()
    return logits_BTV if temperature == 1.0 else logits_BTV / temperature


def entropy(logits_BTV: Tensor, *, temperature: float) -> Tensor:
    """[..., T] entropy in nats of softmax(z / temperature), a bounded number of positions at a time."""
    V = logits_BTV.shape[-1]
    parts = torch.split(logits_BTV.flatten(0, -2), max(1, _ENTROPY_ELEMENTS // V))
    return torch.cat([_entropy(scale(part_NV, temperature)) for part_NV in parts]).view(logits_BTV.shape[:-1])


def _entropy(logits_NV: Tensor) -> Tensor:
    return logits_NV.logsumexp(-1) - (logits_NV.softmax(-1) * logits_NV).sum(-1)
