"""Seeds of sampling: far apart for prompts whose own seeds are neighbours."""

from __future__ import annotations

import xxhash


def sampling_seed(seed: int, attempt: int) -> int:
    """A seed below 2**62 for this prompt and attempt. Engines add the index of a completion to it."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}:{attempt}".encode())) >> 2
