"""A model small enough to learn something in a minute on a CPU, with a tokenizer of one token per character.

The result is an ordinary model directory: transformers and vLLM load it as they load any other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tasks.model import HEAD_SIZE, check_tiny_size

PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
CHARACTERS = "0123456789 >=+-*?"
VOCABULARY = (PAD, EOS, BOS, UNKNOWN, *CHARACTERS)
MAX_LENGTH = 512  # tokens of prompt and answer together


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, BOS in front; a character outside ``CHARACTERS`` becomes ``UNKNOWN``."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_config(*, hidden_size: int, layers: int, tied: bool) -> Qwen2Config:
    """A Qwen2 of ``hidden_size``, two query heads to each key-value head where the size allows.

    Below ``HEAD_SIZE`` it is for transformers alone. Raises TaskError for other sizes that leave no whole heads.
    """
    check_tiny_size(hidden_size)
    heads = max(1, hidden_size // HEAD_SIZE)
    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        initializer_range=0.05,  # at 0.02 a net this narrow spends its first hundred steps near uniform
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=VOCABULARY.index(BOS),
        dtype="float32",
    )


def save_tiny_model(directory: Path, *, hidden_size: int, layers: int, tied: bool, seed: int) -> None:
    """Writes weights, config, generation config and tokenizer into ``directory``: same arguments, same bytes."""
    config = tiny_config(hidden_size=hidden_size, layers=layers, tied=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, bos_token_id=config.bos_token_id
    )
    model.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
