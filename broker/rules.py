"""The staleness rule as pure functions (docs/architecture.md, "The staleness rule").

v: learner version. η: max_staleness. B: groups per step. w: version a generator holds.
"""

from __future__ import annotations

from collections.abc import Mapping

PROMPTS_PER_CALL, GROUPS_PER_CALL = 256, 16  # keep the time small that one call makes the others wait


def next_training_version(version: int, batches_out: int) -> int:
    """The version at which the next assembled batch will be trained: each batch out moves the learner one on."""
    return version + batches_out


def trainable(*, policy_version: int, version: int, batches_out: int, max_staleness: int) -> bool:
    """Whether the next batch could train a token that ``policy_version`` samples now.

    w >= v' - η with v' the version at which that batch is trained. A version that this learner has not made is none:
    -1 is "holds nothing yet", and v + 1 is the newest that can be on its way (offered to the generators just before
    the ledger hears of it).
    """
    known = 0 <= policy_version <= version + 1
    return known and policy_version >= next_training_version(version, batches_out) - max_staleness


def admitted(
    *, policy_version: int, version: int, batches_out: int, outstanding: int, max_staleness: int, window: int
) -> bool:
    """Whether a generator holding ``policy_version`` may lease one more prompt.

    What it samples must be trainable, and fewer than ``window`` groups outstanding (leased, buffered, in batches).
    """
    return outstanding < window and trainable(
        policy_version=policy_version, version=version, batches_out=batches_out, max_staleness=max_staleness
    )


def tokens_left(tokens_per_version: Mapping[int, int], *, version: int, max_staleness: int) -> int:
    """Tokens that carry loss when trained at ``version``."""
    return sum(count for sampled, count in tokens_per_version.items() if sampled >= version - max_staleness)


def tokens_lost_next(tokens_per_version: Mapping[int, int], *, version: int, max_staleness: int) -> int:
    """Tokens that carry loss at ``version`` but no longer at ``version + 1``."""
    return tokens_per_version.get(version - max_staleness, 0)


def is_stale(tokens_per_version: Mapping[int, int], *, version: int, max_staleness: int, on_stale: str) -> bool:
    """Whether a group has nothing to give at ``version``: all tokens too old (mask), or any of them (drop)."""
    if on_stale == "drop":
        return any(sampled < version - max_staleness for sampled in tokens_per_version)
    return tokens_left(tokens_per_version, version=version, max_staleness=max_staleness) == 0 and bool(
        tokens_per_version
    )


def may_sample_more(
    *, held_bytes: int, leased: int, buffered: int, groups_per_step: int, max_buffer_bytes: int
) -> bool:
    """Whether the bytes held allow one more lease: never fewer than the batch being gathered needs."""
    return held_bytes < max_buffer_bytes or leased + buffered < groups_per_step


def has_room(*, held_bytes: int, size: int, buffered: int, groups_per_step: int, max_buffer_bytes: int) -> bool:
    """Whether a group of ``size`` bytes may enter the buffer.

    Up to ``max_buffer_bytes`` in all; but the batch being gathered always gets its groups, or nothing would ever
    leave a full buffer.
    """
    return buffered < groups_per_step or held_bytes + size <= max_buffer_bytes
