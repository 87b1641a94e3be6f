"""Log-probabilities and entropies against the softmax written again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learners.logprobs import entropy, token_logprobs


def test_token_logprobs_and_entropy_are_those_of_the_softmax_at_the_temperature() -> None:
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 5, (3, 4, 17)), rng.integers(0, 17, (3, 4))
    scaled = logits / 0.7
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    got = token_logprobs(torch.tensor(logits).float(), torch.tensor(ids), temperature=0.7)
    np.testing.assert_allclose(got, np.log(np.take_along_axis(p, ids[..., None], -1)[..., 0]), atol=1e-5)
    spread = entropy(torch.tensor(logits).float(), temperature=0.7)
    np.testing.assert_allclose(spread, -(p * np.log(p)).sum(-1), atol=1e-5)


def test_c24_the_temperature_is_applied_on_the_learners_side_too() -> None:
    logp = token_logprobs(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0]]), temperature=0.5)
    assert logp.item() == pytest.approx(-0.126928, abs=1e-6)  # -0.313 with the temperature on the generator's side only
