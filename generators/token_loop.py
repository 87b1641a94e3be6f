"""Sampling with a transformers model, one token at a time, with the weights of the moment.

Legend: n completions of the prompt, P prompt tokens, L tokens sampled so far, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from broker.messages import Prompt
from generators.engine import NonFiniteLogits, Sample


class Answering:
    """One prompt on its way to ``n`` completions; ``step`` samples one token for each that has not ended.

    The same seed gives the same tokens whatever else runs. Rows that have ended are stepped along and ignored: the
    random numbers of the others must not depend on them.
    """

    def __init__(
        self, model: Any, prompt: Prompt, *, seed: int, stop_ids: tuple[int, ...], top_p: float, top_k: int
    ) -> None:
        self._model, self._prompt = model, prompt
        self._greedy = prompt.temperature == 0
        self._top_p, self._top_k = top_p, top_k
        self._device = model.device
        self._stop = torch.tensor(stop_ids, dtype=torch.int64, device=self._device)
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        self._prompt_nP = torch.tensor(prompt.token_ids, dtype=torch.int64, device=self._device).expand(prompt.n, -1)
        self._cache: Any = None
        self._tokens: list[Tensor] = []  # L of [n]
        self._logprobs: list[Tensor] = []  # L of [n]
        self._versions: list[int] = []  # L
        self._lengths = torch.zeros(prompt.n, dtype=torch.int64, device=self._device)  # [n], valid once ended
        self._running = torch.ones(prompt.n, dtype=torch.bool, device=self._device)  # [n]
        self._reasons = ["abort"] * prompt.n

    @property
    def done(self) -> bool:
        """Whether every completion has ended."""
        return not bool(self._running.any())

    def forget_cache(self) -> None:
        """Lets the next step compute keys and values anew, with the weights of that moment."""
        self._cache = None

    @torch.no_grad()
    def step(self, version: int) -> None:
        """Samples one token under ``version``. Raises NonFiniteLogits."""
        logits_nV = self._logits()
        if not bool(torch.isfinite(logits_nV).all()):
            raise NonFiniteLogits(f"non-finite logits at version {version}")
        if self._greedy:
            logprobs_nV = logits_nV.log_softmax(-1)
            token_n = logits_nV.argmax(-1)
        else:
            kept_nV = truncated(logits_nV / self._prompt.temperature, top_p=self._top_p, top_k=self._top_k)
            logprobs_nV = kept_nV.log_softmax(-1)
            token_n = torch.multinomial(logprobs_nV.exp(), 1, generator=self._generator)[:, 0]
        self._tokens.append(token_n)
        self._logprobs.append(logprobs_nV.gather(-1, token_n[:, None])[:, 0])
        self._versions.append(version)
        self._end(torch.isin(token_n, self._stop) & self._running, "stop")
        if len(self._tokens) == self._prompt.max_tokens:
            self._end(self._running.clone(), "length")

    def samples(self) -> list[Sample]:
        """What there is: completions that have not ended carry finish_reason ``"abort"``."""
        self._end(self._running.clone(), "abort")
        if not self._tokens:
            return [_nothing() for _ in self._reasons]
        tokens_nL = torch.stack(self._tokens, 1).cpu().numpy().astype(np.int32)
        logprobs_nL = torch.stack(self._logprobs, 1).float().cpu().numpy()
        rows = zip(tokens_nL, logprobs_nL, self._lengths.tolist(), self._reasons, strict=True)
        return [
            Sample(
                token_ids=tokens[:length],
                behavior_logprobs=logprobs[:length],
                version_runs=_runs(self._versions[:length]),
                finish_reason=reason,
            )
            for tokens, logprobs, length, reason in rows
        ]

    def _logits(self) -> Tensor:
        """[n, V] in fp32 for the next token."""
        if self._cache is not None:
            ids = self._tokens[-1][:, None]
        else:
            ids = torch.cat([self._prompt_nP, *(t[:, None] for t in self._tokens)], dim=1)
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _end(self, rows: Tensor, reason: str) -> None:
        self._lengths[rows] = len(self._tokens)
        self._running &= ~rows
        for row in rows.nonzero()[:, 0].tolist():
            self._reasons[row] = reason


def truncated(logits_nV: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """Logits with everything outside top-k, then outside the nucleus of mass ``top_p``, at -inf."""
    if 0 < top_k < logits_nV.shape[-1]:
        smallest = logits_nV.topk(top_k, dim=-1).values[:, -1:]
        logits_nV = logits_nV.masked_fill(logits_nV < smallest, -torch.inf)
    if top_p < 1:
        sorted_nV, order = logits_nV.sort(dim=-1, descending=True)
        probs = sorted_nV.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of everything likelier; the likeliest token always stays
        sorted_nV = sorted_nV.masked_fill(before >= top_p, -torch.inf)
        logits_nV = torch.empty_like(logits_nV).scatter(-1, order, sorted_nV)
    return logits_nV


def _runs(versions: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[R, 2]: version and how many tokens in a row it sampled."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return np.asarray(runs, np.int32).reshape(-1, 2)


def _nothing() -> Sample:
    return Sample(
        token_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        version_runs=np.zeros((0, 2), np.int32),
        finish_reason="abort",
    )
