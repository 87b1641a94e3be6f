"""Forward passes over a micro-batch: what a model says of the tokens that are trained.

Legend: B rows, K positions from the first that predicts a completion token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learners.batching import MicroBatch
from learners.logprobs import entropy, token_logprobs


def token_passes(
    forward: Callable[..., Any], batch: MicroBatch, *, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """[B, K] log-probabilities of the target tokens at ``temperature``, and [B, K] entropies in nats.

    ``forward``: a causal language model, or an Engine with one. Gradients as the caller has them on; the entropy has
    one only with ``entropy_grad``.
    """
    # No attention mask: padding is on the right, where causal attention does not look (C30).
    logits_BKV = forward(
        input_ids=batch.input_ids_BT, use_cache=False, logits_to_keep=batch.target_ids_BK.shape[1]
    ).logits
    logp_BK = token_logprobs(logits_BKV, batch.target_ids_BK, temperature=temperature)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return logp_BK, entropy(logits_BKV, temperature=temperature)


def value_pass(forward: Callable[..., Any], batch: MicroBatch) -> Tensor:
    """[B, K] float32 what a model with a value head (learners/critic.py) says of the positions before each target."""
    values_BK1 = forward(
        input_ids=batch.input_ids_BT, use_cache=False, logits_to_keep=batch.target_ids_BK.shape[1]
    ).logits
    values_BK: Tensor = values_BK1[..., 0].float()
    return values_BK
