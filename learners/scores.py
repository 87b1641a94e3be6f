"""What a batch is scored with before its first optimizer step, by forward passes without gradient.

    rows ─policy─► log-probabilities at the start ─┐                      ┌─ KL in the reward ─rank 0─► advantages
    rows ─reference─► its log-probabilities ───────┼─► KL of each token ──┤
    rows ─critic─► values ─────────────────────────┘                      └─ GAE ─► advantages, whitened; returns

A pass that nothing needs is left out: GRPO with one optimizer step a batch has none. Legend: B rows, K positions from
the first that predicts a completion token, N completions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from learners.batching import MicroBatch, TrainSequence, collate
from learners.config import AlgorithmConfig
from learners.exchange import MiniBatch, Plan, Rows
from learners.gae import gae, token_rewards
from learners.kl import ESTIMATORS
from learners.stats import over_ranks

_EPS = 1e-6

TokenPass = Callable[[MicroBatch], Tensor]
"""[B, K] of a micro-batch, without gradient; collective."""
Revalue = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Collective. From the KL of each completion [N], the same on every rank, to its advantage [N]."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A micro-batch and what is known of it. ``advantage_BT``: [B, 1], or [B, K] from a critic.

    ``start_logp_BK``: the policy's log-probabilities before the first optimizer step. ``value_BK``, ``return_BK``: the
    critic's values before it, and what they should have been.
    """

    batch: MicroBatch
    rows: Sequence[TrainSequence]
    advantage_BT: Tensor
    start_logp_BK: Tensor | None = None
    reference_logp_BK: Tensor | None = None
    value_BK: Tensor | None = None
    return_BK: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The passes that a configuration needs, over one rank's share of a batch.

    ``policy``, ``reference``, ``critic``: see TokenPass; None where it is not needed.
    """

    algorithm: AlgorithmConfig
    policy: TokenPass | None
    reference: TokenPass | None
    critic: TokenPass | None
    world: int
    device: str

    def of(self, share: Plan[Rows], revalue: Revalue) -> list[MiniBatch[list[Scored]]]:
        """Collective. The share's mini-batches, scored. ``revalue`` is called where the KL acts on a completion's
        reward, which rank 0 has.
        """
        scored = [
            MiniBatch(denominator=one.denominator, micro_batches=[self._pass(rows) for rows in one.micro_batches])
            for one in share.mini_batches
        ]
        if self.critic is not None:
            return self._with_gae(scored)
        if self._kl_in_reward:
            return self._revalued(scored, share.completions, revalue)
        return scored

    @property
    def _kl_in_reward(self) -> bool:
        return self.reference is not None and self.algorithm.kl_in == "reward"

    def _pass(self, rows: Sequence[TrainSequence]) -> Scored:
        batch = collate(rows, device=self.device)
        with torch.no_grad():
            return Scored(
                batch=batch,
                rows=rows,
                advantage_BT=batch.advantage_B.unsqueeze(-1),
                start_logp_BK=self.policy(batch) if self.policy else None,
                reference_logp_BK=self.reference(batch) if self.reference else None,
                value_BK=self.critic(batch) if self.critic else None,
            )

    def _kl(self, one: Scored) -> Tensor:
        """[B, K] float64 KL estimates of the tokens that carry loss, 0 elsewhere."""
        assert one.start_logp_BK is not None and one.reference_logp_BK is not None
        log_q_BK = torch.where(one.batch.mask_BK, one.reference_logp_BK - one.start_logp_BK, 0.0)
        return ESTIMATORS[self.algorithm.kl_estimator](log_q_BK.double())

    def _revalued(
        self, scored: list[MiniBatch[list[Scored]]], completions: int, revalue: Revalue
    ) -> list[MiniBatch[list[Scored]]]:
        kl_N = torch.zeros(completions, dtype=torch.float64)
        for one in _all(scored):
            kl_B = self._kl(one).sum(-1).cpu()
            for row, kl in zip(one.rows, kl_B, strict=False):  # an empty micro-batch is one row of padding
                kl_N[row.index] = kl
        kl_N = kl_N.to(self.device)
        if self.world > 1:
            dist.all_reduce(kl_N)
        advantage_N = revalue(kl_N.cpu().numpy())

        def with_advantages(one: Scored) -> Scored:
            values = torch.zeros_like(one.advantage_BT)
            for b, row in enumerate(one.rows):
                values[b] = float(advantage_N[row.index])
            return replace(one, advantage_BT=values)

        return _each(scored, with_advantages)

    def _with_gae(self, scored: list[MiniBatch[list[Scored]]]) -> list[MiniBatch[list[Scored]]]:
        """With the advantage of each token, whitened over the step, and its return before that."""
        critic = self.algorithm.critic

        def estimated(one: Scored) -> Scored:
            assert one.value_BK is not None
            mask_BK = one.batch.mask_BK.cpu()
            reward_BK = token_rewards(one.batch.advantage_B.cpu().double(), mask_BK)
            if self._kl_in_reward:
                reward_BK = reward_BK - self.algorithm.kl_coef * self._kl(one).cpu()
            advantage_BK, return_BK = gae(
                reward_BK, one.value_BK.cpu(), mask_BK, gamma=critic.gamma, gae_lambda=critic.gae_lambda
            )
            return replace(one, advantage_BT=advantage_BK, return_BK=return_BK)

        made = _each(scored, estimated)
        masks = [one.batch.mask_BK.cpu() for one in _all(made)]
        found = torch.cat([one.advantage_BT[mask] for one, mask in zip(_all(made), masks, strict=True)])
        count, total = over_ranks([float(found.numel()), found.sum()], self.world, self.device)
        mean = total / max(1.0, count)
        (squares,) = over_ranks([(found - mean).square().sum()], self.world, self.device)
        deviation = (squares / max(1.0, count - 1)) ** 0.5

        def whitened(one: Scored) -> Scored:
            white_BK = torch.where(one.batch.mask_BK.cpu(), (one.advantage_BT - mean) / (deviation + _EPS), 0.0)
            assert one.return_BK is not None
            return replace(
                one,
                advantage_BT=white_BK.float().to(self.device),
                return_BK=one.return_BK.float().to(self.device),
            )

        return _each(made, whitened)


def _all(scored: Sequence[MiniBatch[list[Scored]]]) -> list[Scored]:
    return [one for mini_batch in scored for one in mini_batch.micro_batches]


def _each(
    scored: Sequence[MiniBatch[list[Scored]]], function: Callable[[Scored], Scored]
) -> list[MiniBatch[list[Scored]]]:
    return [replace(one, micro_batches=[function(part) for part in one.micro_batches]) for one in scored]
