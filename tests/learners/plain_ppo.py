"""A learner step of several optimizer steps once more: plain PyTorch and numpy, one row at a time, none of our code.

A batch is a list of mini-batches of rows (ranks.rows) with the order of the optimizer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from learners.batching import TrainSequence
from learners.config import AlgorithmConfig
from tests.learners import ranks

Array = NDArray[np.float64]
Parts = Sequence[Sequence[TrainSequence]]


class PlainPpo:
    """The policy, its reference and its critic. ``warm``: learner steps that are the critic's alone."""

    def __init__(self, model_dir: Path, algorithm: AlgorithmConfig, *, critic_lr: float = ranks.OPTIM["lr"]) -> None:
        self.algorithm, self.version = algorithm, 0
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model)
        self.backbone = copy.deepcopy(self.model.model)
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.critic = [*self.backbone.parameters(), *self.head.parameters()]
        self._policy_optimizer = self._optimizer(self.model.parameters(), ranks.OPTIM["lr"])
        self._critic_optimizer = self._optimizer(self.critic, critic_lr)

    def _optimizer(self, parameters: Any, lr: float) -> torch.optim.AdamW:
        settings = {name: ranks.OPTIM[name] for name in ("weight_decay", "eps")}
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), **settings)

    def logp(self, row: TrainSequence, model: Any = None) -> Tensor:
        ids, P = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()]), len(row.prompt_ids)
        table = ((model or self.model)(ids[None]).logits[0, :-1] / ranks.TEMPERATURE).log_softmax(-1)
        chosen: Tensor = table[range(P - 1, len(ids) - 1), ids[P:]]
        return chosen

    def value(self, row: TrainSequence) -> Tensor:
        ids, P = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()]), len(row.prompt_ids)
        values: Tensor = self.head(self.backbone(ids[None]).last_hidden_state)[0, P - 1 : len(ids) - 1, 0]
        return values

    def step(self, parts: Parts, order: Sequence[int]) -> dict[str, float]:
        settings, rows = self.algorithm, [row for part in parts for row in part]
        with torch.no_grad():
            start = {id(row): self.logp(row) for row in rows}
            held = {id(row): self.logp(row, self.reference) for row in rows}
            values = {id(row): self.value(row).double().numpy() for row in rows}
        kl = {key: _kl(settings.kl_estimator, (held[key] - start[key]).double().numpy()) for key in start}
        if settings.advantage == "gae":
            advantages, returns = self._gae(rows, values, kl)
        elif settings.kl_coef and settings.kl_in == "reward":
            sums = {id(row): float((kl[id(row)] * row.loss_mask).sum()) for row in rows}
            worth = {id(row): ranks.REWARDS[row.index] - settings.kl_coef * sums[id(row)] for row in rows}
            advantages = {id(row): np.full(len(row.completion_ids), worth[id(row)]) for row in rows}
        else:
            advantages = {id(row): np.full(len(row.completion_ids), row.advantage) for row in rows}
        for k in order:
            if settings.advantage == "gae":
                self._critic_update(parts[k], values, returns)
            if self.version >= settings.critic.warmup_steps:
                self._policy_update(parts[k], start, held, advantages)
        self.version += 1
        return self._explained(rows, values, returns) if settings.advantage == "gae" else {}

    def _policy_update(
        self, rows: Sequence[TrainSequence], start: dict[int, Tensor], held: dict[int, Tensor], A: dict[int, Array]
    ) -> None:
        total, settings = torch.zeros(()), self.algorithm
        for row in rows:
            logp, key = self.logp(row), id(row)
            behavior, advantage = torch.tensor(row.behavior_logprobs), torch.tensor(A[key]).float()
            if settings.correction.kind == "none":
                weight, rho = torch.ones(()), (logp - behavior).exp()
            else:
                weight = (start[key] - behavior).exp().clamp(max=settings.correction.cap)
                rho = (logp - start[key]).exp()
            bounded = rho.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            loss = -weight * torch.minimum(rho * advantage, bounded * advantage)
            if settings.kl_coef and settings.kl_in == "loss":
                log_q = held[key] - logp
                kl = {"k2": log_q**2 / 2, "k3": log_q.exp() - 1 - log_q}[settings.kl_estimator]
                loss = loss + settings.kl_coef * kl
            total = total + row.weight * (loss * torch.tensor(row.loss_mask)).sum()
        self._apply(self._policy_optimizer, total, list(self.model.parameters()))

    def _critic_update(
        self, rows: Sequence[TrainSequence], values: dict[int, Array], returns: dict[int, Array]
    ) -> None:
        total, clip = torch.zeros(()), self.algorithm.critic.value_clip
        for row in rows:
            value, old = self.value(row), torch.tensor(values[id(row)]).float()
            target = torch.tensor(returns[id(row)]).float()
            near = torch.minimum(torch.maximum(value, old - clip), old + clip)
            worse = torch.maximum((value - target) ** 2, (near - target) ** 2)
            total = total + 0.5 * (worse * torch.tensor(row.loss_mask)).sum()
        self._apply(self._critic_optimizer, total / sum(row.loss_tokens for row in rows), self.critic)

    def _apply(self, optimizer: torch.optim.AdamW, loss: Tensor, parameters: list[torch.nn.Parameter]) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, ranks.OPTIM["max_grad_norm"])
        optimizer.step()

    def _gae(
        self, rows: Sequence[TrainSequence], values: dict[int, Array], kl: dict[int, Array]
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        settings, critic = self.algorithm, self.algorithm.critic
        raw, returns = {}, {}
        for row in rows:
            tokens = np.flatnonzero(row.loss_mask)
            rewards = np.zeros(len(tokens))
            rewards[-1] = row.advantage
            if settings.kl_coef and settings.kl_in == "reward":
                rewards = rewards - settings.kl_coef * kl[id(row)][tokens]
            raw[id(row)], returns[id(row)] = np.zeros(len(row.loss_mask)), np.zeros(len(row.loss_mask))
            found = gae_sums(rewards, values[id(row)][tokens], critic.gamma, critic.gae_lambda)
            raw[id(row)][tokens], returns[id(row)][tokens] = found, found + values[id(row)][tokens]
        every = np.concatenate([raw[id(row)][row.loss_mask > 0] for row in rows])
        return {key: (one - every.mean()) / (every.std(ddof=1) + 1e-6) for key, one in raw.items()}, returns

    def _explained(
        self, rows: Sequence[TrainSequence], values: dict[int, Array], returns: dict[int, Array]
    ) -> dict[str, float]:
        value, returned = (
            np.concatenate([one[id(row)][row.loss_mask > 0] for row in rows]) for one in (values, returns)
        )
        explained = 1 - (returned - value).var() / returned.var()
        return {"value_mean": value.mean(), "value_explained_variance": explained}


def gae_sums(rewards: Array, values: Array, gamma: float, gae_lambda: float) -> Array:
    """GAE as its definition has it: the sum over k of (γ λ)^k δ_{t+k}, with no recursion (arXiv 1506.02438)."""
    n = len(rewards)
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return np.array([sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


def _kl(estimator: str, log_q: Array) -> Array:
    estimates: Array = {"k1": -log_q, "k2": log_q**2 / 2, "k3": np.exp(log_q) - 1 - log_q}[estimator]
    return estimates
