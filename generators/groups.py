"""From raw samples to a group: one function that every mode shares.

L: completion tokens. Token ids go into the group as they were sampled; their text is for rewards and people only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from broker.errors import SlipstreamError
from broker.messages import Completion, Float32Array, Group, Int32Array, Lease
from generators.engine import NonFiniteLogits, Sample
from generators.scoring import Score

Decode = Callable[[Sample], str]
FINISHED = ("stop", "length")


class GroupFailed(SlipstreamError):
    """Too few completions of a group are left to learn from; its lease goes back with this error."""


def decoder(tokenizer: Any) -> Decode:
    """The text of a sample without the token that ended it; other special tokens stay visible to the rewards."""

    def decode(sample: Sample) -> str:
        token_ids = sample.token_ids.tolist()
        if sample.finish_reason == "stop":
            del token_ids[-1:]
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    return decode


def finished(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that ended by themselves. Raises NonFiniteLogits, whichever sample has one."""
    for sample in samples:
        if not np.isfinite(sample.behavior_logprobs).all():
            raise NonFiniteLogits(f"non-finite logits at version {_version_of_first_bad(sample)}")
    return [sample for sample in samples if sample.finish_reason in FINISHED]


def build_group(
    *,
    lease: Lease,
    samples: Sequence[Sample],
    texts: Sequence[str],
    scores: Sequence[Score | None],
    generator: str,
    generation_s: float,
    why: str = "",
) -> Group:
    """The group of the samples that have a score; a score of None is a completion that failed, ``why`` in words.

    Raises GroupFailed when fewer than two are left (one, where only one was asked for): alone, a completion has no
    baseline.
    """
    completions = tuple(
        _completion(sample, text, score)
        for sample, text, score in zip(samples, texts, scores, strict=True)
        if score is not None
    )
    needed = min(2, lease.prompt.n)
    if len(completions) < needed:
        reason = f"; {why}" if why else ""
        raise GroupFailed(f"{len(completions)} of {lease.prompt.n} completions succeeded, {needed} are needed{reason}")
    return Group(
        lease_id=lease.lease_id,
        prompt=lease.prompt,
        generator=generator,
        incarnation=lease.incarnation,
        completions=completions,
        failed_completions=lease.prompt.n - len(completions),
        generation_s=generation_s,
    )


def _completion(sample: Sample, text: str, score: Score) -> Completion:
    return Completion(
        token_ids=_array(sample.token_ids, np.int32),
        behavior_logprobs=_array(sample.behavior_logprobs, np.float32),
        loss_mask=np.ones(len(sample.token_ids), np.uint8),
        version_runs=_array(sample.version_runs, np.int32).reshape(-1, 2),
        finish_reason=sample.finish_reason,
        reward=score.reward,
        reward_parts=score.parts,
        text=text,
    )


def _array(values: Int32Array | Float32Array, dtype: type) -> Any:
    return np.ascontiguousarray(values, dtype)


def _version_of_first_bad(sample: Sample) -> int:
    first = int(np.argmin(np.isfinite(sample.behavior_logprobs)))
    versions = np.repeat(sample.version_runs[:, 0], sample.version_runs[:, 1])
    return int(versions[first])
