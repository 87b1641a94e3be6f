"""The frozen model that a KL divergence holds the policy to.

It has no optimizer and no gradients. It is whole below ZeRO stage 3; at stage 3 each rank has a shard of it, on its
device or, with ``learner.offload_reference``, in CPU memory. Loaded only where ``algorithm.kl_coef`` is above 0.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from learners.batching import MicroBatch
from learners.config import LearnerConfig
from learners.engine import Engine
from learners.model import load_model
from learners.passes import token_passes
from learners.snapshot import Stream
from learners.tensor_files import load_into

_FILES = "reference"


class Reference:
    """One rank's part of the reference model; calling it gives log-probabilities.

    Args:
        model_dir: Hugging Face directory of the policy's initial weights, which are the reference's.
        resume: a checkpoint, where those were replaced.
    """

    def __init__(
        self,
        *,
        model_dir: Path,
        config: LearnerConfig,
        temperature: float,
        attention: str,
        rank: int,
        world: int,
        local_rank: int,
        resume: Path | None,
    ) -> None:
        model = load_model(model_dir, attention=attention, checkpointing=False, packing=config.packing)
        if resume is not None:
            load_into(model, resume, _FILES)
        model.requires_grad_(False).eval()
        self._temperature = temperature
        self.engine = Engine(model, config=config, optim=None, rank=rank, world=world, local_rank=local_rank)
        assert not any(parameter.requires_grad for parameter in self.engine.module.parameters())

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Collective. [B, K] log-probabilities of the target tokens, at the policy's temperature."""
        with torch.no_grad():
            return token_passes(self.engine, batch, temperature=self._temperature)[0]

    def reset(self, policy: Engine) -> None:
        """Takes the policy's present weights, shard by shard."""
        self.engine.copy_from(policy)

    def streams(self) -> dict[str, Stream]:
        """Collective, as they are gone through. Of a checkpoint once ``reset`` may have been called: else the reference
        is the initial model.
        """
        return {_FILES: Stream(self.engine.weights(), self.engine.shapes())}
