"""The policy in training: a Hugging Face model, its version, and the optimizer steps of a batch.

    rows ─Scores─► mini-batch ─forward at T─► log-probabilities ─policy_loss─► backward ─► AdamW step
                   └──────────────── each of them, algorithm.epochs times ────────────────────────────┘─► version + 1

Every method that is marked collective is called by all ranks, in the same order; tensors arrive on rank 0.
Where a batch is one optimizer step, proximal log-probabilities cost no second forward pass: the policy at the start of
the step is the current one, and its log-probabilities are the current ones without their gradient, exactly. Those of a
policy one step before are interpolated.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from learners.batching import MicroBatch
from learners.config import AlgorithmConfig, LearnerConfig
from learners.corrections import interpolated
from learners.critic import Critic
from learners.engine import Engine, device_of
from learners.exchange import MiniBatch, Plan, Rows
from learners.model import load_model
from learners.objective import LossTerms, Objective, policy_loss
from learners.passes import token_passes
from learners.reference import Reference
from learners.schedule import learning_rate
from learners.scores import Revalue, Scored, Scores
from learners.snapshot import Stream, capture
from learners.stats import StepStats, Totals, Updates
from learners.tensor_files import TensorsMissing

log = logging.getLogger(__name__)

_STATE, _OPTIMIZER = "policy.json", "optimizer"


class Policy:
    """The trained model of one rank, with the reference model and the critic that the algorithm asks for.

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
        self._updates = Updates(limit=config.max_bad_steps, lr_setting="learner.optim.lr")
        torch.manual_seed(seed + rank)
        model = load_model(
            resume or model_dir,
            attention=attention,
            checkpointing=config.gradient_checkpointing,
            packing=config.packing,
        )
        self._engine = Engine(model, config=config, optim=config.optim, rank=rank, world=world, local_rank=local_rank)
        self.module: nn.Module = self._engine.module
        place: dict[str, Any] = {
            "model_dir": model_dir, "config": config, "attention": attention, "rank": rank, "world": world,
            "local_rank": local_rank,
        }  # fmt: skip
        self.reference = self.critic = None
        if algorithm.kl_coef:
            replaced = resume if algorithm.reference_reset_steps else None
            self.reference = Reference(**place, temperature=temperature, resume=replaced)
        if algorithm.critic.enabled:
            self.critic = Critic(**place, critic=algorithm.critic, resume=resume)
        self._scores = Scores(
            algorithm=algorithm,
            policy=self.logprobs if algorithm.needs_start_logprobs else None,
            reference=self.reference,
            critic=self.critic,
            world=world,
            device=self.device,
        )
        if resume is not None:
            self._load(resume, seed)

    # -- training ----------------------------------------------------------------------------------------------
    def step(self, share: Plan[Rows], revalue: Revalue) -> StepStats:
        """Collective. The optimizer steps of one batch. ``version`` grows by one here and nowhere else, however many
        they are; one without finite gradients has no effect, and if none has any the version stays. ``revalue``: see
        Scores.

        Raises NonFiniteGradients after ``learner.max_bad_steps`` optimizer steps in a row without effect.
        """
        lr = learning_rate(self._config.optim, version=self.version, total_steps=self._config.total_steps)
        self._engine.set_lr(lr)
        scored, totals = self._scores.of(share, revalue), Totals()
        learns = self.critic is None or self.version >= self._algorithm.critic.warmup_steps
        for k in share.order:
            if self.critic is not None:
                self.critic.update(scored[k], version=self.version)
            if learns:
                self._update(scored[k], totals)
        learned, parts = self.critic.numbers(scored) if self.critic is not None else (False, {})
        tokens = sum(share.mini_batches[k].denominator for k in share.order) if learns else 0
        return self._finish(totals, tokens, parts, lr=lr, learned=learned)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Collective. [B, K] log-probabilities of the target tokens, without gradient."""
        with torch.no_grad():
            return token_passes(self._engine, batch, temperature=self._temperature)[0]

    def _update(self, mini_batch: MiniBatch[list[Scored]], totals: Totals) -> None:
        for one in mini_batch.micro_batches:
            terms = self._forward(one)
            self._engine.backward(terms.loss)
            totals.add(terms)
        self._updates.saw(self._engine.apply(), version=self.version)

    def _forward(self, one: Scored) -> LossTerms:
        batch = one.batch
        logp_BK, entropy_BK = token_passes(
            self._engine, batch, temperature=self._temperature, entropy_grad=self._algorithm.entropy_coef > 0
        )
        proximal_BK = logp_BK.detach() if one.start_logp_BK is None else one.start_logp_BK
        if self._algorithm.proximal == "interpolated":
            proximal_BK = interpolated(batch.behavior_logp_BK, logp_BK.detach(), batch.staleness_BK)
        return policy_loss(
            self._objective,
            logp_BT=logp_BK,
            proximal_logp_BT=proximal_BK,
            behavior_logp_BT=batch.behavior_logp_BK,
            advantage_BT=one.advantage_BT,
            weight_B=batch.weight_B,
            mask_BT=batch.mask_BK,
            entropy_BT=entropy_BK,
            reference_logp_BT=one.reference_logp_BK,
        )

    def _finish(
        self, totals: Totals, tokens: int, parts: Mapping[str, float], *, lr: float, learned: bool
    ) -> StepStats:
        """Collective. The version after a batch and what is told of it. ``tokens``: over all optimizer steps."""
        updates, skipped, grad_norm = self._updates.take()
        applied = learned or skipped < updates
        self.version += applied
        every = self._algorithm.reference_reset_steps
        if self.reference is not None and applied and every and self.version % every == 0:
            self.reference.reset(self._engine)
        total, tokens = totals.over_ranks(self._world, self.device), max(1, tokens)
        if self.reference is not None:
            parts = {"kl_reference": float(total.kl_reference) / tokens, **parts}
        return StepStats(
            version=self.version,
            applied=applied,
            lr=lr,
            loss=float(total.loss) / max(1, updates),
            grad_norm=grad_norm,
            updates=updates,
            skipped_updates=skipped,
            ratio_mean=float(total.ratio) / tokens,
            ratio_max=float(total.ratio_max),
            clip_fraction=float(total.clipped) / tokens,
            ess_share=float(total.ratio) ** 2 / max(1e-30, tokens * float(total.ratio_squared)),
            sequence_ratio_max=float(total.sequence_ratio_max),
            rejected_share=float(total.rejected) / tokens,
            kl_behavior_k1=float(total.kl_k1) / tokens,
            kl_behavior=float(total.kl_k3) / tokens,
            entropy=float(total.entropy) / tokens,
            parts=parts,
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
        weights = Stream(self._engine.weights(), self._engine.shapes())
        capture({"model": weights}, draft, rank=self._rank, background=False)()
        if self._rank == 0:
            self._write_configs(draft)
            shutil.rmtree(directory, ignore_errors=True)
            draft.rename(directory)
        self._barrier()

    def save(self, directory: Path) -> None:
        """Collective. Everything to go on from, into an existing directory: model, optimizer, version, RNG, the critic,
        and the reference if it is no longer the initial model. See learners/snapshot.py.
        """
        self.capture(directory, background=False)()

    def capture(self, directory: Path, *, background: bool) -> Callable[[], None]:
        """Collective. Saves this rank's random numbers at once; what is returned writes the rest, on rank 0.

        With ``background`` the rest is a copy in CPU memory, and training may go on before it is written.
        """
        rng = {"cpu": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            rng["cuda"] = torch.cuda.get_rng_state()
        save_file(rng, directory / f"rng-{self._rank:05d}.safetensors")
        steps = self._engine.steps
        states = {_STATE: {"version": self.version, "optimizer_steps": steps, "ranks": self._world}}
        streams = {
            "model": Stream(self._engine.weights(), self._engine.shapes()),
            _OPTIMIZER: Stream(self._engine.moments(), self._engine.moment_shapes() if steps else {}),
        }
        if self.reference is not None and self._algorithm.reference_reset_steps:
            streams |= self.reference.streams()
        if self.critic is not None:
            streams |= self.critic.streams()
            states |= self.critic.states()
        finish = capture(streams, directory, rank=self._rank, background=background)

        def write() -> None:
            finish()
            if self._rank == 0:
                self._write_configs(directory)
                for name, state in states.items():
                    (directory / name).write_text(json.dumps(state), encoding="utf-8")

        return write

    def _write_configs(self, directory: Path) -> None:
        model: Any = self.module
        for source in self._model_dir.iterdir():
            if source.suffix in (".json", ".txt", ".model", ".jinja") and not source.name.endswith(".index.json"):
                shutil.copyfile(source, directory / source.name)
        model.config.save_pretrained(directory)

    def _load(self, directory: Path, seed: int) -> None:
        """Optimizer, version and RNG; the weights were loaded with the model. Raises TensorsMissing.

        The optimizer takes a step a version or more, but for the critic's warm-up: fewer steps than versions would be
        moments that begin anew.
        """
        try:
            state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
            self.version, steps = int(state["version"]), int(state["optimizer_steps"])
        except (OSError, ValueError, KeyError) as error:
            raise TensorsMissing(f"{directory / _STATE} cannot be read: {error}") from error
        if self.critic is None and steps < self.version:
            raise TensorsMissing(f"{directory}: version {self.version} with the optimizer's state after {steps} steps")
        self._engine.load_moments(directory, _OPTIMIZER, steps=steps)
        if int(state["ranks"]) != self._world:
            log.warning(
                "%s was saved by %d ranks, this run has %d: random numbers start from the seed",
                directory, state["ranks"], self._world,
            )  # fmt: skip
            torch.manual_seed(seed + self._rank)
            return
        file = directory / f"rng-{self._rank:05d}.safetensors"
        if not file.is_file():
            raise TensorsMissing(f"{file} is missing: the random numbers of rank {self._rank}")
        rng = load_file(file)
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and self.device.startswith("cuda"):
            torch.cuda.set_rng_state(rng["cuda"])

    def _barrier(self) -> None:
        if self._world > 1:
            dist.barrier()
