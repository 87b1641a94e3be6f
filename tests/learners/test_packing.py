"""Which models take packed rows and a token head, and that those that do not are found out and train the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from learners.batching import TrainSequence, collate
from learners.model import load_model
from learners.packing import CannotPack, packs
from learners.passes import token_passes
from learners.token_head import TokenHead

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[type[Any], Any]] = {
    "sliding": (MistralForCausalLM, lambda: MistralConfig(**SMALL, sliding_window=4)),
    "scaled": (GraniteForCausalLM, lambda: GraniteConfig(**SMALL, logits_scaling=3.0)),
    "convolution": (Lfm2ForCausalLM, lambda: Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    made = {}
    for name, (kind, config) in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        kind(config()).save_pretrained(made[name])
    return made


def rows() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            prompt_ids=rng.integers(0, 64, P).astype(np.int32),
            completion_ids=rng.integers(0, 64, L).astype(np.int32),
            loss_mask=np.ones(L, np.uint8),
            behavior_logprobs=np.zeros(L, np.float32),
            staleness=np.zeros(L, np.int32),
            advantage=0.0,
            weight=0.0,
        )
        for P, L in ((3, 9), (1, 2), (12, 5))
    ]


@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_the_log_probabilities_of_its_rows_one_by_one(
    directories: dict[str, Path], name: str, packing: str
) -> None:
    model = load_model(directories[name], attention="sdpa", checkpointing=False, packing=packing)
    logp_BK, entropy_BK = token_passes(model, collate(rows()), temperature=0.7)
    plain = AutoModelForCausalLM.from_pretrained(directories[name], attn_implementation="eager", dtype=torch.float32)
    for b, row in enumerate(rows()):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        P, L = len(row.prompt_ids), len(row.completion_ids)
        with torch.no_grad():
            table = (plain(ids[None]).logits[0, P - 1 : -1] / 0.7).log_softmax(-1)
        assert (logp_BK[b, :L] - table[range(L), ids[P:]]).abs().max() < 1e-4
        assert (entropy_BK[b, :L] + (table.exp() * table).sum(-1)).abs().max() < 1e-4


def test_a_sliding_window_is_kept_in_packed_rows(directories: dict[str, Path]) -> None:
    assert packs(load_model(directories["sliding"], attention="sdpa", checkpointing=False))


def test_a_model_that_scales_its_logits_has_all_of_them_made(directories: dict[str, Path]) -> None:
    scaled = load_model(directories["scaled"], attention="sdpa", checkpointing=False)
    assert not isinstance(scaled.get_output_embeddings(), TokenHead)  # type: ignore[operator]
    plain = load_model(directories["sliding"], attention="sdpa", checkpointing=False)
    assert isinstance(plain.get_output_embeddings(), TokenHead)  # type: ignore[operator]


def test_a_model_whose_layers_mix_neighbouring_tokens_is_padded(directories: dict[str, Path]) -> None:
    assert not packs(load_model(directories["convolution"], attention="sdpa", checkpointing=False))
    with pytest.raises(CannotPack, match=r"learner\.packing=on: the model has layers of the types conv"):
        load_model(directories["convolution"], attention="sdpa", checkpointing=False, packing="on")


def test_rows_that_see_each_other_are_found_out_by_their_log_probabilities(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attends_everywhere(self: Any, hidden_states: torch.Tensor, **settings: Any) -> torch.Tensor:
        return hidden_states + hidden_states.cumsum(1)

    monkeypatch.setattr("transformers.models.mistral.modeling_mistral.MistralMLP.forward", attends_everywhere)
    assert not packs(load_model(directories["sliding"], attention="sdpa", checkpointing=False))
    with pytest.raises(CannotPack, match="rows see each other"):
        load_model(directories["sliding"], attention="sdpa", checkpointing=False, packing="on")


def test_other_attention_than_sdpa_is_padded(directories: dict[str, Path]) -> None:
    assert not packs(load_model(directories["sliding"], attention="eager", checkpointing=False))
    with pytest.raises(CannotPack, match=r"model\.attention=sdpa"):
        load_model(directories["sliding"], attention="eager", checkpointing=False, packing="on")
