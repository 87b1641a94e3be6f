"""Forward passes over a micro-batch: what a model says of the tokens that are trained.

Legend: B rows, K completion tokens of the longest, N tokens that carry loss, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learners.batching import MicroBatch
from learners.logprobs import entropy, token_logprobs
from learners.packing import packs
from learners.token_head import Asked, TokenHead


def token_passes(
    forward: Callable[..., Any], batch: MicroBatch, *, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """[B, K] log-probabilities of the target tokens at ``temperature``, and [B, K] entropies in nats; 0 where a token
    carries no loss, which costs no logits.

    ``forward``: a causal language model of ``load_model``, or an Engine with one. Gradients as the caller has them on;
    the entropy has one only with ``entropy_grad``.
    """
    model: Any = getattr(forward, "module", forward)
    inputs, at_N = batch.inputs(packed=packs(model))
    target_N = batch.target_ids_BK.flatten()[batch.loss_columns_N]
    head = model.get_output_embeddings()
    if isinstance(head, TokenHead):
        asked = Asked(at_N=at_N, target_N=target_N, temperature=temperature, entropy_grad=entropy_grad)
        with head.asked(asked):
            logp_N, entropy_N = forward(**inputs, use_cache=False).logits[0].unbind(-1)
    else:
        logits_NV = forward(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, at_N)
        logp_N = token_logprobs(logits_NV, target_N, temperature=temperature)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy_N = entropy(logits_NV, temperature=temperature)
    return batch.in_columns(logp_N), batch.in_columns(entropy_N if entropy_grad else entropy_N.detach())


def value_pass(forward: Callable[..., Any], batch: MicroBatch) -> Tensor:
    """[B, K] float32 what a model with a value head (learners/critic.py) says of the positions before each target; 0
    where a token carries no loss.
    """
    model: Any = getattr(forward, "module", forward)
    inputs, at_N = batch.inputs(packed=packs(model))
    values_N1 = forward(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, at_N)
    return batch.in_columns(values_N1[:, 0].float())
