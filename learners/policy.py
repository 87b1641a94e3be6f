"""The policy in training: a Hugging Face model, its version, and one optimizer step a batch.

    micro-batches ─forward at T─► log-probabilities ─policy_loss─► backward ─► AdamW step: version + 1

Every method that is marked collective is called by all ranks, in the same order; tensors arrive on rank 0.
Proximal log-probabilities cost no second forward pass: a batch is one optimizer step, so the policy at the start of
the step is the current one, and its log-probabilities are the current ones without their gradient, exactly. Those of a
policy one step before are interpolated.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from broker.errors import SlipstreamError
from learners.batching import MicroBatch
from learners.config import AlgorithmConfig, LearnerConfig
from learners.corrections import interpolated
from learners.engine import Engine, device_of
from learners.model import load_model
from learners.objective import LossTerms, Objective, policy_loss
from learners.passes import token_passes
from learners.schedule import learning_rate
from learners.stats import StepStats, Totals

log = logging.getLogger(__name__)

_STATE, _OPTIMIZER = "policy.json", "optimizer"


class NonFiniteGradients(SlipstreamError):
    """``learner.max_bad_steps`` steps in a row had gradients that are not finite."""


class Policy:
    """The trained model of one rank.

    Args:
        model_dir: Hugging Face directory of the initial weights, and of tokenizer and configs for ``export``.
        resume: directory that ``save`` wrote; weights, optimizer, version and RNG come from there.
        temperature: of sampling; log-probabilities are computed at it.
    """

    def __init__(
        self,
        *,
        model_dir: Path,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        seed: int,
        attention: str = "sdpa",
        rank: int = 0,
        world: int = 1,
        local_rank: int = 0,
        resume: Path | None = None,
    ) -> None:
        self.version = 0
        self._model_dir, self._config, self._algorithm, self._temperature = model_dir, config, algorithm, temperature
        self._objective = Objective.of(algorithm)
        self._rank, self._world, self.device = rank, world, device_of(config, local_rank)
        self._bad_steps = 0
        torch.manual_seed(seed + rank)
        model = load_model(
            resume or model_dir,
            attention=attention,
            checkpointing=config.gradient_checkpointing,
            packing=config.packing,
        )
        self._engine = Engine(model, config=config, optim=config.optim, rank=rank, world=world, local_rank=local_rank)
        self.module: nn.Module = self._engine.module
        if resume is not None:
            self._load(resume, seed)

    # -- training ----------------------------------------------------------------------------------------------
    def step(self, micro_batches: Sequence[MicroBatch], *, denominator: int) -> StepStats:
        """Collective. One optimizer step; ``version`` grows by one here and nowhere else, unless gradients are not
        finite. ``denominator``: loss tokens of the step over all ranks, for the means of what is reported.

        Raises NonFiniteGradients after ``learner.max_bad_steps`` such steps in a row.
        """
        lr = learning_rate(self._config.optim, version=self.version, total_steps=self._config.total_steps)
        self._engine.set_lr(lr)
        totals = Totals()
        for micro_batch in micro_batches:
            terms = self._forward(micro_batch)
            self._engine.backward(terms.loss)
            totals.add(terms)
        grad_norm = self._engine.apply()
        applied = math.isfinite(grad_norm)
        self.version += applied
        self._bad_steps = 0 if applied else self._bad_steps + 1
        if self._bad_steps >= self._config.max_bad_steps:
            raise NonFiniteGradients(
                f"{self._bad_steps} steps in a row at version {self.version} had gradients that are not finite "
                "(learner.max_bad_steps); lower learner.optim.lr, or look at the batch's behavior log-probabilities"
            )
        return self._stats(totals, denominator, applied=applied, lr=lr, grad_norm=grad_norm)

    def _forward(self, batch: MicroBatch) -> LossTerms:
        logp_BK, entropy_BK = token_passes(
            self._engine, batch, temperature=self._temperature, entropy_grad=self._algorithm.entropy_coef > 0
        )
        proximal_BK = logp_BK.detach()
        if self._algorithm.proximal == "interpolated":
            proximal_BK = interpolated(batch.behavior_logp_BK, proximal_BK, batch.staleness_BK)
        return policy_loss(
            self._objective,
            logp_BT=logp_BK,
            proximal_logp_BT=proximal_BK,
            behavior_logp_BT=batch.behavior_logp_BK,
            advantage_B=batch.advantage_B,
            weight_B=batch.weight_B,
            mask_BT=batch.mask_BK,
            entropy_BT=entropy_BK,
        )

    def _stats(self, totals: Totals, denominator: int, *, applied: bool, lr: float, grad_norm: float) -> StepStats:
        total, tokens = totals.over_ranks(self._world, self.device), max(1, denominator)
        return StepStats(
            version=self.version,
            applied=applied,
            lr=lr,
            loss=float(total.loss),
            grad_norm=grad_norm,
            ratio_mean=float(total.ratio) / tokens,
            ratio_max=float(total.ratio_max),
            clip_fraction=float(total.clipped) / tokens,
            ess_share=float(total.ratio) ** 2 / max(1e-30, tokens * float(total.ratio_squared)),
            sequence_ratio_max=float(total.sequence_ratio_max),
            rejected_share=float(total.rejected) / tokens,
            kl_behavior_k1=float(total.kl_k1) / tokens,
            kl_behavior=float(total.kl_k3) / tokens,
            entropy=float(total.entropy) / tokens,
        )

    # -- weights -----------------------------------------------------------------------------------------------
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. See Engine.weights."""
        return self._engine.weights()

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """See Engine.parts."""
        return self._engine.parts()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Engine.shapes."""
        return self._engine.shapes()

    # -- disk --------------------------------------------------------------------------------------------------
    def export(self, directory: Path) -> None:
        """Collective. Writes a Hugging Face directory with tokenizer, reads its shapes back, and only then puts it in
        place of the one before. Raises TensorsMissing.
        """
        draft = directory.with_name(f".tmp-{directory.name}")
        if self._rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        self._write_model(draft)
        if self._rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            draft.rename(directory)
        self._barrier()

    def save(self, directory: Path) -> None:
        """Collective. Everything to go on from, into an existing directory: model, optimizer, version, RNG.

        Tensors are saved whole, so that any number of ranks at any ZeRO stage can load them (C71).
        """
        self._write_model(directory)
        rng = {"cpu": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            rng["cuda"] = torch.cuda.get_rng_state()
        save_file(rng, directory / f"rng-{self._rank:05d}.safetensors")
        steps = self._engine.save_moments(directory, _OPTIMIZER)
        if self._rank == 0:
            state = {"version": self.version, "adam_steps": steps, "ranks": self._world}
            (directory / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def _write_model(self, directory: Path) -> None:
        if self._rank == 0:
            model: Any = self.module
            for source in self._model_dir.iterdir():
                if source.suffix in (".json", ".txt", ".model", ".jinja") and not source.name.endswith(".index.json"):
                    shutil.copyfile(source, directory / source.name)
            model.config.save_pretrained(directory)
        self._engine.save_weights(directory, "model")

    def _load(self, directory: Path, seed: int) -> None:
        """Optimizer, version and RNG; the weights were loaded with the model. Raises TensorsMissing."""
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        self.version = int(state["version"])
        self._engine.load_moments(directory, _OPTIMIZER, steps=int(state["adam_steps"]))
        if int(state["ranks"]) != self._world:
            log.warning(
                "%s was saved by %d ranks, this run has %d: random numbers start from the seed",
                directory, state["ranks"], self._world,
            )  # fmt: skip
            torch.manual_seed(seed + self._rank)
            return
        rng = load_file(directory / f"rng-{self._rank:05d}.safetensors")
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and self.device.startswith("cuda"):
            torch.cuda.set_rng_state(rng["cuda"])

    def _barrier(self) -> None:
        if self._world > 1:
            dist.barrier()
