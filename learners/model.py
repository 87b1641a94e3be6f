"""The Hugging Face model that the policy trains."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging


def load_model(directory: Path, *, attention: str, checkpointing: bool) -> nn.Module:
    """The causal language model of a directory, in float32 and without dropout, ready for training."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(directory)
    for name, value in config.to_dict().items():
        # Dropout would make the learner's log-probabilities differ from those of the generator with the same weights.
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation=attention
    )
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def layer_classes(model: nn.Module) -> list[str]:
    """Class names of the model's layers, the parts that it says should not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return sorted(names & {type(module).__name__ for module in model.modules()})
