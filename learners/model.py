"""The Hugging Face model that the policy trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from learners.packing import pack
from learners.token_head import Asked, TokenHead

log = logging.getLogger(__name__)


def load_model(directory: Path, *, attention: str, checkpointing: bool, packing: str = "auto") -> nn.Module:
    """The causal language model of a directory, in float32 and without dropout, ready for training.

    Raises CannotPack.
    """
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(directory)
    for name, value in config.to_dict().items():
        # Dropout would make the learner's log-probabilities differ from those of the generator with the same weights.
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation=attention
    )
    use_token_head(model)
    pack(model, attention=attention, packing=packing)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model.train()


@torch.no_grad()
def use_token_head(model: Any) -> None:
    """Puts a TokenHead in place of the output layer, unless the model changes its logits after it, as some do."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    ids = torch.tensor([[5, 9, 3, 8, 2]])
    wanted_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    made = TokenHead.of(head)
    model.set_output_embeddings(made)
    at_N = torch.arange(ids.shape[1])
    with made.asked(Asked(at_N=at_N, target_N=ids[0], temperature=1.0, entropy_grad=False)):
        got_N = model(input_ids=ids, use_cache=False).logits[0, :, 0]
    if (got_N - wanted_TV[at_N, ids[0]]).abs().max().item() > 1e-3:
        log.info("%s changes its logits after the output layer: all of a micro-batch are made", type(model).__name__)
        model.set_output_embeddings(head)


def layer_classes(model: nn.Module) -> list[str]:
    """Class names of the model's layers, the parts that it says should not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return sorted(names & {type(module).__name__ for module in model.modules()})
