"""What a group must satisfy beyond its types before it is pushed, and before it is trained."""

from __future__ import annotations

import math

import numpy as np

from broker.errors import Refused
from broker.messages import Completion, Group


def refuse_malformed(group: Group) -> None:
    """Raises Refused unless tokens, log-probabilities, mask and versions of every completion have grown together."""
    for index, completion in enumerate(group.completions):
        problem = _problem(completion)
        if problem:
            raise Refused(f"item {group.prompt.item}, completion {index}: {problem}")


def _problem(completion: Completion) -> str:
    length, runs = len(completion.token_ids), completion.version_runs
    if completion.behavior_logprobs.shape != (length,) or completion.loss_mask.shape != (length,):
        return (
            f"{length} tokens, log-probabilities {completion.behavior_logprobs.shape}, "
            f"loss mask {completion.loss_mask.shape}: they must grow together"
        )
    counts = runs[:, 1].tolist() if runs.ndim == 2 and runs.shape[1] == 2 else [-1]
    if min(counts, default=0) < 0 or sum(counts) != length:
        return f"version runs {runs.tolist()} do not cover {length} tokens"
    if not math.isfinite(float(completion.behavior_logprobs.sum(dtype=np.float64))):
        return "a log-probability is not finite: the weights it was sampled with are garbage"
    return ""
