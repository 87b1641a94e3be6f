"""The learning rate as a function of the policy version: nothing to save, nothing to get out of step."""

from __future__ import annotations

import math

from learners.config import OptimConfig


def learning_rate(config: OptimConfig, *, version: int, total_steps: int) -> float:
    """The rate of the step that leads from ``version`` to ``version + 1``.

    Warm-up is linear over ``warmup_steps``; then constant, or linear or cosine down to ``min_lr_ratio`` at the end.
    """
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (version - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
