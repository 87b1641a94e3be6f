"""The policy in training: a Hugging Face model under DeepSpeed, the only file that imports it.

    micro-batches ─forward at T─► log-probabilities ─policy_loss─► backward (ZeRO reduces) ─► AdamW step: version + 1

Every method that is marked collective is called by all ranks, in the same order; tensors arrive on rank 0.
The weights are float32 and so is the optimizer: ZeRO's parameter shards are the master weights themselves.
Proximal log-probabilities cost no second forward pass: a batch is one optimizer step, so the policy at the start of
the step is the current one, and its log-probabilities are the current ones without their gradient, exactly. Those of a
policy one step before are interpolated.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import warnings
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
from learners.logprobs import entropy, token_logprobs
from learners.model import layer_classes, load_model
from learners.objective import LossTerms, Objective, policy_loss
from learners.schedule import learning_rate
from learners.sharding import Sharding, local_shard, whole_shape
from learners.stats import StepStats, Totals
from learners.tensor_files import check_tensors, read_tensors, write_tensors
from weights_sync.staging import persistent_buffers

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = "policy.json"


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
        self._rank, self._world, self._stage = rank, world, config.zero_stage
        self.device = f"cuda:{local_rank}" if config.device == "cuda" else config.device
        self._sharding = Sharding(partitioned=config.zero_stage == 3, rank=rank, world=world, device=self.device)
        self._bad_steps = 0
        torch.manual_seed(seed + rank)
        model = load_model(resume or model_dir, attention=attention, checkpointing=config.gradient_checkpointing)
        self._engine = _engine(model, config, local_rank=local_rank)
        self.module: nn.Module = self._engine.module
        self._engine.enable_backward_allreduce = self._stage > 0  # at stage 0 _reduce_gradients does it
        if resume is not None:
            self._load(resume, seed)

    # -- training ----------------------------------------------------------------------------------------------
    def step(self, micro_batches: Sequence[MicroBatch], *, denominator: int) -> StepStats:
        """Collective. One optimizer step; ``version`` grows by one here and nowhere else, unless gradients are not
        finite. ``denominator``: loss tokens of the step over all ranks, for the means of what is reported.

        Raises NonFiniteGradients after ``learner.max_bad_steps`` such steps in a row.
        """
        lr = learning_rate(self._config.optim, version=self.version, total_steps=self._config.total_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        totals = Totals()
        for micro_batch in micro_batches:
            terms = self._forward(micro_batch)
            self._engine.backward(terms.loss * self._world, scale_wrt_gas=False)  # ZeRO means over ranks; ours is a sum
            totals.add(terms)
        grad_norm = self._apply()
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
        # No attention mask: padding is on the right, where causal attention does not look (C30).
        logits_BKV = self._engine(
            input_ids=batch.input_ids_BT, use_cache=False, logits_to_keep=batch.target_ids_BK.shape[1]
        ).logits
        logp_BK = token_logprobs(logits_BKV, batch.target_ids_BK, temperature=self._temperature)
        with torch.set_grad_enabled(self._algorithm.entropy_coef > 0):
            entropy_BK = entropy(logits_BKV, temperature=self._temperature)
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

    def _apply(self) -> float:
        """The optimizer step. Returns the gradient norm before clipping; not finite: nothing was applied."""
        if self._stage == 0 and not self._reduce_gradients():
            self._engine.zero_grad()
            return math.inf
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._stage else self._norm

    def _reduce_gradients(self) -> bool:
        """Mean and clip of whole gradients, which ZeRO does by itself from stage 1 on. Returns whether finite."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if self._world > 1:
            flat = torch.cat([grad.reshape(-1) for grad in grads]) / self._world
            dist.all_reduce(flat)
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self._norm = float(nn.utils.clip_grad_norm_(parameters, self._config.optim.max_grad_norm))
        return math.isfinite(self._norm)

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
        """Collective. (name, whole tensor) on rank 0, nothing on the others, which must exhaust it all the same.

        A tied tensor comes once, under its first name; persistent buffers follow the parameters. A tensor is valid
        until the next one is asked for.
        """
        yield from self._sharding.whole((name, whole_shape(p), local_shard(p)) for name, p in self._parameters())
        if self._rank == 0:
            yield from persistent_buffers(self.module)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's elements) of what ``weights_sync.staging.declare`` declares for it; no collective."""
        for name, parameter in self._parameters():
            mine = self._sharding.part(whole_shape(parameter), local_shard(parameter))
            if mine.numel():
                yield name, mine
        if self._rank == 0:
            yield from persistent_buffers(self.module)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of everything that ``weights`` yields."""
        shapes = {name: whole_shape(p) for name, p in self._parameters()}
        return shapes | {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self.module)}

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
        steps = _adam_steps(self._engine)
        if steps:
            moments = self._moments()
            if self._rank == 0:
                write_tensors(directory, "optimizer", moments)
            else:
                _exhaust(moments)
        if self._rank == 0:
            state = {"version": self.version, "adam_steps": steps, "ranks": self._world}
            (directory / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def _write_model(self, directory: Path) -> None:
        if self._rank != 0:
            _exhaust(self.weights())
            return
        model: Any = self.module
        for source in self._model_dir.iterdir():
            if source.suffix in (".json", ".txt", ".model", ".jinja") and not source.name.endswith(".index.json"):
                shutil.copyfile(source, directory / source.name)
        model.config.save_pretrained(directory)
        write_tensors(directory, "model", self.weights())
        check_tensors(directory, "model", self.shapes())

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. AdamW's two moments of every parameter, as ``weights``."""
        for key in _MOMENTS:
            yield from self._sharding.whole(
                (f"{name}.{key}", whole_shape(p), self._moment(p, key)) for name, p in self._parameters()
            )

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's shard at stage 3; the whole below it, a collective at stages 1 and 2."""
        api = _deepspeed().utils
        if self._stage == 0:
            moment = self._engine.optimizer.state[parameter][key]
        elif self._stage < 3:
            moment = api.safe_get_full_optimizer_state(parameter, key)
        else:
            moment = api.safe_get_local_optimizer_state(parameter, key)
        assert isinstance(moment, Tensor)
        return moment

    def _load(self, directory: Path, seed: int) -> None:
        """Optimizer, version and RNG; the weights were loaded with the model. Raises TensorsMissing."""
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        self.version = int(state["version"])
        if state["adam_steps"]:
            parameters = dict(self._parameters())
            wanted = {f"{name}.{key}": whole_shape(p) for name, p in parameters.items() for key in _MOMENTS}
            check_tensors(directory, "optimizer", wanted)
            _fill_adam(self._engine, int(state["adam_steps"]))
            for name, value in read_tensors(directory, "optimizer"):
                owner, _, key = name.rpartition(".")
                self._set_moment(parameters[owner], key, value)
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

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if self._stage == 0:
            self._engine.optimizer.state[parameter][key].copy_(value)
        elif self._stage < 3:
            _deepspeed().utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)
        else:
            mine = self._sharding.mine(value, local_shard(parameter).numel())
            _deepspeed().utils.safe_set_local_optimizer_state(parameter, mine, key)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its first name: tied ones are one parameter."""
        return self.module.named_parameters()

    def _barrier(self) -> None:
        if self._world > 1:
            dist.barrier()


def _deepspeed() -> Any:
    import deepspeed

    return deepspeed


def _engine(model: nn.Module, config: LearnerConfig, *, local_rank: int) -> Any:
    """The DeepSpeed engine; torch.distributed is initialised already."""
    os.environ |= {
        "DS_ACCELERATOR": config.device,
        "LOCAL_RANK": str(local_rank),
        # Else DeepSpeed starts a process in every step to count NUMA nodes.
        "LOCAL_SIZE": str(config.ranks),
        # Nothing here is compiled; else decorators in an unused module of DeepSpeed import all of torch's compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
    deepspeed = _deepspeed()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # about names it calls
    # Its shared-memory collectives for CPU would be compiled for most of a minute; gloo's serve.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=config.backend, verbose=False)
    if config.zero_stage == 3 and (layers := layer_classes(model)):
        # One gather a layer, not one a Linear: hooks on every leaf cost more than a small model's arithmetic.
        deepspeed.utils.set_z3_leaf_modules(model, layers)
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=_deepspeed_config(config)
    )
    return engine


def _deepspeed_config(config: LearnerConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": False}
    if config.zero_stage == 3:
        # Parameters that stay whole are gathered one by one after each step; with 0 all come in coalesced gathers.
        # The memory-efficient Linear is a Python autograd function around every Linear.
        zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # unused: we own the micro-batches
        "managed_gradient_accumulation": False,  # every step() ends an accumulation
        "gradient_clipping": config.optim.max_grad_norm if config.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled, and torch's AdamW is what we resume
        "steps_per_print": None,
    }


def _masters(engine: Any) -> list[Tensor]:
    """The tensors that the torch optimizer steps: flat shards under ZeRO, the parameters without."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return list(engine.module.parameters())


def _torch_optimizer(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _adam_steps(engine: Any) -> int:
    """Steps that AdamW has taken, for its bias correction; 0 before the first."""
    state = _torch_optimizer(engine).state
    return max((int(one["step"]) for one in state.values() if "step" in one), default=0)


def _fill_adam(engine: Any, steps: int) -> None:
    """Makes the state that AdamW would make in its first step, to be filled from a checkpoint."""
    state = _torch_optimizer(engine).state
    for master in _masters(engine):
        state[master] = {"step": torch.tensor(float(steps))} | {key: torch.zeros_like(master) for key in _MOMENTS}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _exhaust(items: Iterator[object]) -> None:
    for _ in items:
        pass
