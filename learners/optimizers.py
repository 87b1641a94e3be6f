"""The optimizers that a learner can train with, and what of their state a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from learners.config import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """Over float32 parameters, which ZeRO puts its own shards in place of."""
    if optim.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)
    settings: dict[str, Any] = {
        "lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay
    }  # fmt: skip
    if optim.optimizer == "cpu_adamw":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use

        made: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **settings)
        return made
    return torch.optim.AdamW(parameters, **settings)


def state_keys(optim: OptimConfig) -> tuple[str, ...]:
    """Names of the tensors that the optimizer keeps for each parameter, in the parameter's shape."""
    if optim.optimizer == "sgd":
        return ("momentum_buffer",) if optim.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def empty_state(optim: OptimConfig, master: Tensor, *, steps: int) -> dict[str, Any]:
    """The state that the optimizer would have made for one tensor in its first step, to be filled."""
    state: dict[str, Any] = {key: torch.zeros_like(master) for key in state_keys(optim)}
    if optim.optimizer != "sgd":
        state["step"] = steps if optim.optimizer == "cpu_adamw" else torch.tensor(float(steps))
    return state
