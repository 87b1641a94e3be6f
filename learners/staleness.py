"""The hard bound: which tokens of a batch may be trained at the learner's version, and how old those are.

v: learner version. η: max_staleness. A token sampled at version w is trainable at v when v - η <= w <= v.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from broker.errors import SlipstreamError
from broker.messages import Batch, Completion, Group


class BoundViolated(SlipstreamError):
    """A token outside the bound would be trained: a bug in the ledger or here, and fatal."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """What the bound did to a batch, in tokens.

    Attributes:
        tokens: tokens that carry loss.
        masked: tokens that carried loss until the bound took it from them.
        histogram: tokens that carry loss, by their staleness in learner steps (C35: per token, never per sample).
    """

    tokens: int
    masked: int
    histogram: Mapping[int, int]

    @property
    def oldest(self) -> int:
        """Staleness of the oldest token that carries loss; 0 when none does."""
        return max(self.histogram, default=0)

    @property
    def mean(self) -> float:
        """Token-weighted mean staleness."""
        return sum(age * count for age, count in self.histogram.items()) / max(1, self.tokens)

    @property
    def masked_share(self) -> float:
        """Of all tokens that the policy sampled."""
        return self.masked / max(1, self.tokens + self.masked)


def apply_bound(batch: Batch, *, version: int, max_staleness: int, on_stale: str) -> tuple[Batch, Staleness]:
    """The batch with loss only where the bound allows it, and its staleness at learner version ``version``.

    ``on_stale`` is ``"mask"`` (too old a token is context only) or ``"drop"`` (its whole group is).
    Raises BoundViolated when a token outside the bound would still be trained.
    """
    oldest_allowed = version - max_staleness
    before = _loss_tokens(batch)
    groups = tuple(_bounded(group, oldest_allowed, on_stale) for group in batch.groups)
    bounded = replace(batch, groups=groups)
    after = _loss_tokens(bounded)
    outside = sorted(sampled for sampled in after if not oldest_allowed <= sampled <= version)
    if outside:
        raise BoundViolated(
            f"batch {batch.batch_id} holds loss tokens sampled at versions {outside}; learner version {version} with "
            f"rollout.max_staleness = {max_staleness} allows {oldest_allowed} to {version}"
        )
    tokens = sum(after.values())
    histogram = {version - sampled: count for sampled, count in sorted(after.items(), reverse=True)}
    return bounded, Staleness(tokens=tokens, masked=sum(before.values()) - tokens, histogram=histogram)


def _loss_tokens(batch: Batch) -> Counter[int]:
    counts: Counter[int] = Counter()
    for group in batch.groups:
        counts.update(group.tokens_per_version())
    return counts


def _bounded(group: Group, oldest_allowed: int, on_stale: str) -> Group:
    versions = group.tokens_per_version()
    if all(sampled >= oldest_allowed for sampled in versions):
        return group
    if on_stale == "drop":
        return replace(group, completions=tuple(_without_loss(one) for one in group.completions))
    return replace(group, completions=tuple(_masked(one, oldest_allowed) for one in group.completions))


def _without_loss(completion: Completion) -> Completion:
    return replace(completion, loss_mask=np.zeros_like(completion.loss_mask))


def _masked(completion: Completion, oldest_allowed: int) -> Completion:
    fresh = completion.versions() >= oldest_allowed
    return replace(completion, loss_mask=(completion.loss_mask.astype(bool) & fresh).astype(np.uint8))
