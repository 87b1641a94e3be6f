"""Prompts and groups made to size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from broker.messages import Completion, Group, Lease, Prompt, Rules, Split

PROMPT_TOKENS = 64


def prompts(positions: Iterable[int]) -> list[Prompt]:
    """Training prompts at these positions."""
    token_ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return [
        Prompt(
            item=str(position),
            position=position,
            epoch=0,
            split=Split.TRAIN,
            token_ids=token_ids,
            text="What is 12 + 30?",
            reference="42",
            n=8,
            temperature=1.0,
            max_tokens=1024,
            seed=position,
        )
        for position in positions
    ]


def rules(*, groups_per_step: int, max_staleness: int, member_timeout_s: float = 10.0) -> Rules:
    """Rules of a run with this B and η, with the other settings' usual values."""
    return Rules(
        max_staleness=max_staleness,
        on_stale="mask",
        groups_per_step=groups_per_step,
        max_attempts=3,
        lease_timeout_s=30.0,
        member_timeout_s=member_timeout_s,
    )


def group(*, completions: int, tokens: int) -> Group:
    """A group without a lease, sampled by policy version 0."""
    random = np.random.default_rng(0)
    return Group(
        lease_id="",
        prompt=prompts([0])[0],
        generator="bench",
        incarnation=0,
        completions=tuple(
            Completion(
                token_ids=random.integers(0, 150_000, tokens, dtype=np.int32),
                behavior_logprobs=-random.random(tokens, dtype=np.float32),
                loss_mask=np.ones(tokens, dtype=np.uint8),
                version_runs=np.array([(0, tokens)], dtype=np.int32),
                finish_reason="stop",
                reward=1.0,
                reward_parts={"answer": 1.0},
                text="12 + 30 = 42",
            )
            for _ in range(completions)
        ),
        failed_completions=0,
        generation_s=5.0,
    )


def sampled_by(sample: Group, first: int, second: int) -> Group:
    """The group with each completion sampled half by the one, half by the other policy version."""
    tokens = len(sample.completions[0].token_ids)
    runs = [(first, tokens)] if first == second else [(first, tokens // 2), (second, tokens - tokens // 2)]
    version_runs = np.array(runs, dtype=np.int32)
    return replace(sample, completions=tuple(replace(one, version_runs=version_runs) for one in sample.completions))


def answer(sample: Group, lease: Lease) -> Group:
    """A ready-made group as the answer to this lease."""
    return replace(sample, lease_id=lease.lease_id, prompt=lease.prompt, incarnation=lease.incarnation)
