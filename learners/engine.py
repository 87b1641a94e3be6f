"""A module in training under DeepSpeed, the only file that imports it.

    forward ─► backward (ZeRO reduces) ─► apply: one step of the optimizer

Every method that is marked collective is called by all ranks, in the same order; tensors arrive on rank 0.
The weights are float32 and so is the optimizer: ZeRO's parameter shards are the master weights themselves. With
``learner.dtype: bfloat16`` matrix products are computed in bfloat16, from weights that are rounded where they are used.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from broker.errors import SlipstreamError
from learners.config import LearnerConfig, OptimConfig
from learners.model import layer_classes
from learners.optimizers import empty_state, make_optimizer, state_keys
from learners.sharding import Sharding, local_shard, whole_shape
from learners.tensor_files import check_tensors, read_tensors
from weights_sync.staging import persistent_buffers


class Engine:
    """One rank's part of a module that all ranks train together; calling it is a forward pass.

    Args:
        module: with its initial weights, whole, on every rank.
        optim: ``set_lr`` changes the learning rate afterwards. None: the module is frozen, without an optimizer, and
            only for forward passes.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: LearnerConfig,
        optim: OptimConfig | None,
        rank: int = 0,
        world: int = 1,
        local_rank: int = 0,
    ) -> None:
        self.device = device_of(config, local_rank)
        self._rank, self._world, self._stage, self._optim = rank, world, config.zero_stage, optim
        self._sharding = Sharding(partitioned=self._stage == 3, rank=rank, world=world, device=self.device)
        self._keys, self.steps = state_keys(optim) if optim else (), 0
        self.module: nn.Module = module
        if config.dtype == "bfloat16":
            # Around the module: DeepSpeed's engine would turn it off. No cache: it would keep whole weights.
            module.forward = torch.autocast(config.device, torch.bfloat16, cache_enabled=False)(module.forward)
        if optim is None and self._stage < 3:
            self._deepspeed: Any = module.to(self.device)
            return
        self._deepspeed = _engine(module, config, optim, local_rank=local_rank)
        self._deepspeed.enable_backward_allreduce = self._stage > 0  # at stage 0 _reduce_gradients does it
        self.module = self._deepspeed.module

    # -- training ----------------------------------------------------------------------------------------------
    def __call__(self, **inputs: Any) -> Any:
        """The module's forward pass; collective at stage 3."""
        return self._deepspeed(**inputs)

    def backward(self, loss: Tensor) -> None:
        """Collective. Adds the gradients of this rank's ``loss``; a step's are the sum over micro-batches and ranks."""
        self._deepspeed.backward(loss * self._world, scale_wrt_gas=False)  # ZeRO means over ranks; ours is a sum

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next ``apply``."""
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = lr

    def apply(self) -> float:
        """Collective. The optimizer step. Returns the gradient norm before clipping; not finite: nothing applied.

        ``steps`` counts those applied.
        """
        if self._stage == 0 and not self._reduce_gradients():
            self._deepspeed.zero_grad()
            return math.inf
        self._deepspeed.step()
        norm = float(self._deepspeed.get_global_grad_norm()) if self._stage else self._norm
        self.steps += math.isfinite(norm)
        return norm

    def _reduce_gradients(self) -> bool:
        """Mean and clip of whole gradients, which ZeRO does by itself from stage 1 on. Returns whether finite."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if self._world > 1:
            flat = torch.cat([grad.reshape(-1) for grad in grads]) / self._world
            dist.all_reduce(flat)
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        assert self._optim is not None
        self._norm = float(nn.utils.clip_grad_norm_(parameters, self._optim.max_grad_norm))
        return math.isfinite(self._norm)

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

    def copy_from(self, other: Engine) -> None:
        """Takes the weights of another module of the same shapes and layout, each rank its own elements."""
        with torch.no_grad():
            for (name, mine), (other_name, theirs) in zip(self._parameters(), other._parameters(), strict=True):
                assert name == other_name
                local_shard(mine).copy_(local_shard(theirs))
            theirs_of = dict(persistent_buffers(other.module))
            for name, buffer in persistent_buffers(self.module):
                buffer.copy_(theirs_of[name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of everything that ``weights`` yields."""
        shapes = {name: whole_shape(p) for name, p in self._parameters()}
        return shapes | {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self.module)}

    # -- disk --------------------------------------------------------------------------------------------------
    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. The optimizer's state of every parameter, as ``weights``; nothing before the first step."""
        for key in self._keys if self.steps else ():
            yield from self._sharding.whole(
                (f"{name}.{key}", whole_shape(p), self._moment(p, key)) for name, p in self._parameters()
            )

    def moment_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of everything that ``moments`` yields after the first step."""
        return {f"{name}.{key}": whole_shape(p) for name, p in self._parameters() for key in self._keys}

    def load_moments(self, directory: Path, stem: str, *, steps: int) -> None:
        """What ``moments`` has yielded after ``steps`` of the optimizer. Raises TensorsMissing."""
        self.steps = steps
        if not steps or not self._keys:
            return
        parameters = dict(self._parameters())
        check_tensors(directory, stem, self.moment_shapes())
        assert self._optim is not None
        _fill_state(self._deepspeed, self._optim, steps)
        for name, value in read_tensors(directory, stem):
            owner, _, key = name.rpartition(".")
            self._set_moment(parameters[owner], key, value)

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's shard at stage 3; the whole below it, a collective at stages 1 and 2."""
        api = _import().utils
        if self._stage == 0:
            moment = self._deepspeed.optimizer.state[parameter][key]
        elif self._stage < 3:
            moment = api.safe_get_full_optimizer_state(parameter, key)
        else:
            moment = api.safe_get_local_optimizer_state(parameter, key)
        assert isinstance(moment, Tensor)
        return moment

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if self._stage == 0:
            self._deepspeed.optimizer.state[parameter][key].copy_(value)
        elif self._stage < 3:
            _import().utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)
        else:
            mine = self._sharding.mine(value, local_shard(parameter).numel())
            _import().utils.safe_set_local_optimizer_state(parameter, mine, key)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, under its first name: tied ones are one parameter."""
        return self.module.named_parameters()


def device_of(config: LearnerConfig, local_rank: int) -> str:
    """Where this rank computes."""
    return f"cuda:{local_rank}" if config.device == "cuda" else config.device


def _import() -> Any:
    import deepspeed

    return deepspeed


def _engine(model: nn.Module, config: LearnerConfig, optim: OptimConfig | None, *, local_rank: int) -> Any:
    """The DeepSpeed engine; torch.distributed is initialised already."""
    os.environ |= {
        "DS_ACCELERATOR": config.device,
        "LOCAL_RANK": str(local_rank),
        # Else DeepSpeed starts a process in every step to count NUMA nodes.
        "LOCAL_SIZE": str(config.ranks),
        # Nothing here is compiled; else decorators in an unused module of DeepSpeed import all of torch's compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
    deepspeed = _import()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # about names it calls
    # Its shared-memory collectives for CPU would be compiled for most of a minute; gloo's serve.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=config.backend, verbose=False)
    if config.zero_stage == 3 and (layers := layer_classes(model)):
        # One gather a layer, not one a Linear: hooks on every leaf cost more than a small model's arithmetic.
        deepspeed.utils.set_z3_leaf_modules(model, layers)
    if optim is None:
        return deepspeed.initialize(model=model, config=_frozen_config(config))[0]
    if config.offload_optimizer == "nvme" and not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(
        verbose=False
    ):
        raise SlipstreamError(
            "learner.offload_optimizer=nvme: DeepSpeed cannot compile its asynchronous I/O here; install libaio with "
            "its header (libaio-dev, libaio-devel), or set learner.offload_optimizer=cpu"
        )
    optimizer = make_optimizer(model.parameters(), optim)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=_deepspeed_config(config, optim)
    )
    return engine


# Parameters that stay whole are gathered one by one after each step; with 0 all come in coalesced gathers. The
# memory-efficient Linear is a Python autograd function around every Linear.
_STAGE_3 = {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}


def _frozen_config(config: LearnerConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, **_STAGE_3}
    if config.offload_reference != "none":
        zero["offload_param"] = {"device": config.offload_reference}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": None}


def _deepspeed_config(config: LearnerConfig, optim: OptimConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": False}
    if config.zero_stage == 3:
        zero |= _STAGE_3
    if config.offload_optimizer != "none":
        nvme = {"nvme_path": config.offload_dir} if config.offload_optimizer == "nvme" else {}
        zero["offload_optimizer"] = {"device": config.offload_optimizer} | nvme
    if config.offload_param != "none":
        zero["offload_param"] = {"device": config.offload_param}
    return {
        "train_micro_batch_size_per_gpu": 1,  # unused: we own the micro-batches
        "managed_gradient_accumulation": False,  # every step() ends an accumulation
        "gradient_clipping": optim.max_grad_norm if config.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # learner.optim.optimizer says which
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


def _fill_state(engine: Any, optim: OptimConfig, steps: int) -> None:
    """Makes the state that the optimizer would make in its first step, to be filled from a checkpoint."""
    state = _torch_optimizer(engine).state
    for master in _masters(engine):
        state[master] = empty_state(optim, master, steps=steps)
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
