"""PPO's critic: what reward is to come at each token, learned beside the policy.

It is a copy of the model with one number a position in place of its head, under a DeepSpeed engine of its own, and is
never sent to a generator. Legend: B rows, K positions from the first that predicts a completion token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learners.batching import MicroBatch
from learners.config import CriticConfig, LearnerConfig
from learners.engine import Engine
from learners.exchange import MiniBatch
from learners.model import load_model
from learners.passes import value_pass
from learners.schedule import learning_rate
from learners.scores import Scored
from learners.snapshot import Stream
from learners.stats import Updates, over_ranks
from learners.tensor_files import TensorsMissing, load_into

_FILES, _OPTIMIZER, _STATE = "critic", "critic_optimizer", "critic.json"


class Critic:
    """One rank's part of the critic; calling it gives values.

    Args:
        model_dir: Hugging Face directory of the initial policy, which the critic starts from.
        resume: a checkpoint. Raises TensorsMissing when it holds no critic.
    """

    def __init__(
        self,
        *,
        model_dir: Path,
        config: LearnerConfig,
        critic: CriticConfig,
        attention: str,
        rank: int,
        world: int,
        local_rank: int,
        resume: Path | None,
    ) -> None:
        checkpointing, packing = config.gradient_checkpointing, config.packing
        model = with_value_head(
            load_model(model_dir, attention=attention, checkpointing=checkpointing, packing=packing)
        )
        steps = 0
        if resume is not None:
            steps = _read_steps(resume)
            load_into(model, resume, _FILES)
        self._optim = config.optim.model_copy(update={"lr": critic.lr or config.optim.lr})
        self._critic, self._config, self._rank, self._world = critic, config, rank, world
        self.engine = Engine(model, config=config, optim=self._optim, rank=rank, world=world, local_rank=local_rank)
        if resume is not None:
            self.engine.load_moments(resume, _OPTIMIZER, steps=steps)
        self._updates = Updates(limit=config.max_bad_steps, lr_setting="algorithm.critic.lr")
        self._loss = self._clipped = self._tokens = 0.0

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Collective. [B, K] the value of having written all before each target token."""
        with torch.no_grad():
            return value_pass(self.engine, batch)

    def update(self, mini_batch: MiniBatch[list[Scored]], *, version: int) -> None:
        """Collective. One optimizer step on the clipped squared error. Raises NonFiniteGradients."""
        self.engine.set_lr(learning_rate(self._optim, version=version, total_steps=self._config.total_steps))
        tokens = max(1, mini_batch.denominator)
        for one in mini_batch.micro_batches:
            assert one.value_BK is not None and one.return_BK is not None
            value_BK = value_pass(self.engine, one.batch)
            loss, clipped = value_loss(
                value_BK, one.value_BK, one.return_BK, one.batch.mask_BK, clip=self._critic.value_clip
            )
            self.engine.backward(loss / tokens)
            self._loss, self._clipped = self._loss + float(loss.detach()), self._clipped + float(clipped)
        self._tokens += tokens
        self._updates.saw(self.engine.apply(), version=version)

    def numbers(self, scored: Sequence[MiniBatch[list[Scored]]]) -> tuple[bool, dict[str, float]]:
        """Collective. (whether anything was learned since the last call, what to report of it).

        ``value_explained_variance``: 1 - Var(return - value) / Var(return) over the loss tokens, values and returns
        from before the step; 0 where all returns are equal.
        """
        sums = [self._loss, self._clipped, *_moments(scored)]
        loss, clipped, count, value, *moments = over_ranks(sums, self._world, self.engine.device)
        updates, skipped, norm = self._updates.take()
        tokens, self._loss, self._clipped, self._tokens = max(1.0, self._tokens), 0.0, 0.0, 0.0
        returned, error = (
            max(0.0, square - total**2 / max(1.0, count))
            for total, square in zip(moments[:2], moments[2:], strict=True)
        )
        return updates > skipped, {
            "value_loss": loss / tokens,
            "value_clip_fraction": clipped / tokens,
            "value_mean": value / max(1.0, count),
            "value_explained_variance": 1 - error / returned if returned > 0 else 0.0,
            "value_grad_norm": norm,
            "value_skipped_updates": float(skipped),
        }

    def streams(self) -> dict[str, Stream]:
        """Collective, as they are gone through. What a checkpoint holds, whole: weights and optimizer."""
        moments = self.engine.moment_shapes() if self.engine.steps else {}
        return {
            _FILES: Stream(self.engine.weights(), self.engine.shapes()),
            _OPTIMIZER: Stream(self.engine.moments(), moments),
        }

    def states(self) -> dict[str, dict[str, int]]:
        """File name and content of what else a checkpoint holds."""
        return {_STATE: {"optimizer_steps": self.engine.steps}}


def with_value_head(model: nn.Module) -> nn.Module:
    """The model with one number a position in place of its logits; 0 everywhere at first, so that nothing is drawn."""
    whole: Any = model
    head = nn.Linear(whole.get_output_embeddings().in_features, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    whole.set_output_embeddings(head)
    whole.config.tie_word_embeddings = False
    whole.config.final_logit_softcapping = None  # Gemma's: it would bound the values
    return model


def value_loss(
    value_BK: Tensor, old_BK: Tensor, return_BK: Tensor, mask_BK: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """(sum over the loss tokens, tokens where the clip holds) of max((V - R)², (clip(V, V_old ± clip) - R)²) / 2.

    PPO's value loss as in OpenAI Baselines and verl; the paper (arXiv 1707.06347) has the plain square.
    """
    bounded_BK = old_BK + (value_BK - old_BK).clamp(-clip, clip)
    plain_BK, held_BK = (value_BK - return_BK).square(), (bounded_BK - return_BK).square()
    loss_BK = torch.where(mask_BK, torch.maximum(plain_BK, held_BK), 0.0)
    return loss_BK.sum() / 2, (mask_BK & (held_BK > plain_BK)).sum()


def _moments(scored: Sequence[MiniBatch[list[Scored]]]) -> Tensor:
    """[6] over this rank's loss tokens: count, ΣV, ΣR, Σ(R - V), ΣR², Σ(R - V)²."""
    total = torch.zeros(6, dtype=torch.float64)
    for one in (one for mini_batch in scored for one in mini_batch.micro_batches):
        assert one.value_BK is not None and one.return_BK is not None
        mask_BK = one.batch.mask_BK
        value, returned = one.value_BK[mask_BK].double().cpu(), one.return_BK[mask_BK].double().cpu()
        error = returned - value
        total += torch.stack(
            [
                torch.tensor(float(len(value)), dtype=torch.float64),
                *(part.sum() for part in (value, returned, error, returned.square(), error.square())),
            ]
        )
    return total


def _read_steps(directory: Path) -> int:
    file = directory / _STATE
    if not file.is_file():
        raise TensorsMissing(
            f"{directory} holds no critic ({_STATE} is missing): it was saved without algorithm.critic.enabled; resume "
            "from another checkpoint (learner.checkpoint.resume), or set algorithm.advantage to one without a critic"
        )
    return int(json.loads(file.read_text(encoding="utf-8"))["optimizer_steps"])
