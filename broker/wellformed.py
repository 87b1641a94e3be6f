"""What prompts and groups must satisfy beyond their types before the ledger takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from broker.errors import Refused
from broker.messages import Completion, Group, Prompt, Split

_EVAL_ITEM = re.compile(r"eval(\d{1,15})\.(\d{1,15})")


def refuse_misnamed(prompts: Sequence[Prompt]) -> None:
    """Raises Refused unless training items are named ``<position>`` and evaluation items ``eval<version>.<position>``.

    The ledger and the frontier rely on it: an item's name is its place in the feed.
    """
    for prompt in prompts:
        named = prompt.item.removeprefix("eval").partition(".")[2] if prompt.split is Split.EVAL else prompt.item
        if prompt.position < 0 or named != str(prompt.position):
            raise Refused(f"{prompt.split} item {prompt.item!r} is not named by its position {prompt.position}")


def round_version(prompts: Sequence[Prompt]) -> int:
    """The one policy version that these evaluation prompts belong to, from their names. Raises Refused."""
    matches = [_EVAL_ITEM.fullmatch(prompt.item) for prompt in prompts]
    versions = {int(match[1]) for match in matches if match}
    if len(versions) != 1 or not all(matches):
        raise Refused(f"evaluation items must be named eval<version>.<i>, one version a call: {prompts[0].item!r}, …")
    return versions.pop()


def refuse_malformed(group: Group) -> None:
    """Raises Refused unless tokens, log-probabilities, mask and versions of every completion have grown together."""
    for index, completion in enumerate(group.completions):
        problem = _problem(completion)
        if problem:
            raise Refused(f"item {group.prompt.item}, completion {index}: {problem}")


def payload_bytes(group: Group) -> int:
    """Bytes of the group's arrays and texts: what holding it costs, whatever the backend."""
    total = group.prompt.token_ids.nbytes + len(group.prompt.text)
    for completion in group.completions:
        arrays = (completion.token_ids, completion.behavior_logprobs, completion.loss_mask, completion.version_runs)
        total += sum(array.nbytes for array in arrays) + len(completion.text)
    return total


def _problem(completion: Completion) -> str:
    length, runs = len(completion.token_ids), completion.version_runs
    if completion.behavior_logprobs.shape != (length,) or completion.loss_mask.shape != (length,):
        return (
            f"{length} tokens, log-probabilities {completion.behavior_logprobs.shape}, "
            f"loss mask {completion.loss_mask.shape}: they must grow together"
        )
    if runs.ndim != 2 or runs.shape[1] != 2 or (runs[:, 1] < 0).any() or int(runs[:, 1].sum()) != length:
        return f"version runs {runs.tolist()} do not cover {length} tokens"
    if not np.isfinite(completion.behavior_logprobs).all():
        return "a log-probability is not finite: the weights it was sampled with are garbage"
    return ""
