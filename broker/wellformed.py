"""What a group must satisfy beyond its types before it is pushed, and before it is trained."""

from __future__ import annotations

import math
import re

import numpy as np

from broker.errors import Refused
from broker.messages import Completion, Frontier, Group, Rules

MOST_INCARNATIONS = 1 << 20
MOST_STEPS = 10**13  # versions and positions; Lua writes numbers with 14 digits
_TOKEN = re.compile(r"[!-~]{1,64}")
_TOLD_CHARACTERS = 300


def refuse_malformed(group: Group) -> None:
    """Raises Refused unless tokens, log-probabilities, mask and versions of every completion have grown together."""
    if group.prompt.token_ids.ndim != 1:
        raise Refused(f"item {group.prompt.item}: prompt tokens of shape {group.prompt.token_ids.shape}")
    for index, completion in enumerate(group.completions):
        try:
            problem = _problem(completion)
        except (TypeError, AttributeError, ValueError, IndexError) as error:  # a field of another type
            problem = str(error)
        if problem:
            raise Refused(f"item {group.prompt.item}, completion {index}: {problem}")


def refuse_senseless(*, rules: Rules, version: int, frontier: Frontier, after: int, token: str) -> None:
    """Raises Refused for rules and numbers that no learner has, with which the ledger would wait or grow for ever."""
    times = (rules.lease_timeout_s, rules.member_timeout_s)
    sizes = (rules.groups_per_step, rules.max_attempts, rules.max_buffer_bytes)
    if not all(0 < one < math.inf for one in times) or min(sizes) < 1 or rules.max_staleness < 0:
        raise Refused(f"no run can have these rules: {str(rules)[:_TOLD_CHARACTERS]}")
    if rules.on_stale not in ("mask", "drop"):
        raise Refused(f"rollout.on_stale is mask or drop, not {rules.on_stale[:_TOLD_CHARACTERS]!r}")
    if after >= MOST_INCARNATIONS:
        raise Refused(f"no learner has been started {after} times")
    if not 0 <= version < MOST_STEPS:
        raise Refused(f"no learner is at version {version}")
    if not 0 <= frontier.base < MOST_STEPS or not all(0 <= one < MOST_STEPS for one in frontier.beyond):
        raise Refused(f"no data position is {frontier.base} and {len(frontier.beyond)} beyond it")
    if not _TOKEN.fullmatch(token):
        raise Refused("a call's token is 1 to 64 letters, digits and signs of ASCII")


def _problem(completion: Completion) -> str:
    if completion.token_ids.ndim != 1:
        return f"tokens of shape {completion.token_ids.shape}"
    length, runs, logprobs = len(completion.token_ids), completion.version_runs, completion.behavior_logprobs
    if logprobs.shape != (length,) or completion.loss_mask.shape != (length,):
        return (
            f"{length} tokens, log-probabilities {logprobs.shape}, "
            f"loss mask {completion.loss_mask.shape}: they must grow together"
        )
    counts = runs[:, 1].tolist() if runs.ndim == 2 and runs.shape[1] == 2 else [-1]
    if min(counts, default=0) < 0 or sum(counts) != length:
        return f"version runs {runs[:8].tolist()} (of {len(runs)}) do not cover {length} tokens"
    if not np.isfinite(logprobs).all():
        return "a log-probability is not finite: the weights it was sampled with are garbage"
    rewards = (completion.reward, *completion.reward_parts.values())
    return "" if all(map(math.isfinite, rewards)) else "a reward is not finite"
