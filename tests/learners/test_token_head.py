"""Log-probabilities and entropies from hidden states, a chunk at a time, against the whole table of logits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from learners import token_head
from learners.token_head import Asked, TokenHead, chunked_logprobs

N, H, V = 13, 6, 29


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((N, H), (V, H), (V,)))
    return hidden, weight, bias, torch.randint(0, V, (N,))


def by_the_table(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, T: float) -> tuple[Tensor, Tensor]:
    table = (hidden @ weight.T + (0 if bias is None else bias)).div(T).log_softmax(-1)
    return table[range(N), ids], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4 * V, 13 * V, 1 << 20])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_of_any_size_give_the_values_and_gradients_of_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, chunk: int, with_bias: bool, temperature: float
) -> None:
    monkeypatch.setitem(token_head.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, bias, ids = tensors()
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    by_token, by_entropy = torch.randn(N), torch.randn(N)
    for entropy_grad in (False, True):
        wanted = by_the_table(hidden, weight, bias if with_bias else None, ids, temperature)
        got = chunked_logprobs(
            hidden, weight, bias if with_bias else None, ids, temperature=temperature, entropy_grad=entropy_grad
        )
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert got[1].requires_grad == entropy_grad
        share = by_entropy if entropy_grad else 0.0 * by_entropy
        losses = [(by_token * logp + share * entropy).sum() for logp, entropy in (got, wanted)]
        ours, theirs = (torch.autograd.grad(loss, inputs) for loss in losses)
        for mine, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)


def test_the_values_are_float32_whatever_the_weights_are() -> None:
    hidden, weight, _, ids = tensors(torch.bfloat16)
    logp, entropy = chunked_logprobs(hidden, weight, None, ids, temperature=1.0)
    assert logp.dtype == entropy.dtype == torch.float32
    logp.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype is torch.bfloat16


def test_nothing_is_computed_for_a_token_that_is_not_asked_for() -> None:
    head = TokenHead.of(nn.Linear(H, V, bias=False))
    hidden = torch.randn(2, 5, H, requires_grad=True)
    asked = Asked(at_N=torch.tensor([1, 7]), target_N=torch.tensor([3, 4]), temperature=1.0, entropy_grad=False)
    with head.asked(asked):
        found = head(hidden)
    assert found.shape == (1, 2, 2)
    found[..., 0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten(0, 1).any(-1).nonzero().flatten().tolist() == [1, 7]
    torch.testing.assert_close(head(hidden), nn.functional.linear(hidden, head.weight))  # and it is a Linear again


MEMORY = """
import re, sys, torch
from pathlib import Path
from learners.token_head import chunked_logprobs
V = int(sys.argv[1])
torch.set_num_threads(1)
hidden, weight = torch.randn(1024, 16, requires_grad=True), torch.randn(V, 16, requires_grad=True)
def kib(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
chunked_logprobs(hidden[:8], weight, None, torch.zeros(8, dtype=torch.long), temperature=1.0)[0].sum().backward()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kib("VmRSS")
chunked_logprobs(hidden, weight, None, torch.zeros(1024, dtype=torch.long), temperature=1.0)[0].sum().backward()
print(kib("VmHWM") - before)
"""


def test_the_memory_is_that_of_a_chunk_however_large_the_vocabulary() -> None:
    repository = Path(__file__).parents[2]
    for vocabulary in (32_000, 128_000):
        told = subprocess.run(
            [sys.executable, "-c", MEMORY, str(vocabulary)], cwd=repository, capture_output=True, text=True, check=True
        )
        grown_bytes = int(told.stdout) * 1024
        assert (
            4 * token_head.CHUNK_ELEMENTS["cpu"] // 2
            < grown_bytes
            < 3 * 4 * token_head.CHUNK_ELEMENTS["cpu"]
            < 4 * 1024 * vocabulary
        )
