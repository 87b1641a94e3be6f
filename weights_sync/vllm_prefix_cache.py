"""Keeps the policy versions apart in vLLM's prefix cache; lives in vLLM's core process, where its scheduler is.

vLLM finds a prompt's cached blocks by the hash of its tokens and of its request's ``cache_salt``, both taken when the
request is made. Keys and values also depend on the weights, and a request may wait in vLLM's queue over a swap. So the
salt is brought up to date at the only point where cached blocks are looked for: when a request is about to start, or,
its blocks having been taken away, to start again. Requests that run keep the blocks they have.
"""

from __future__ import annotations

import functools
from typing import Any

_SWAPS = "_slipstream_swaps"


def salt(swaps: int) -> str:
    """``cache_salt`` of requests made after so many swaps; the scheduler corrects it where a swap came in between."""
    return f"v{swaps}"


def keep_versions_apart() -> None:
    """Hooks this process's vLLM scheduler. Raises AttributeError where vLLM's scheduler has changed too much."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, _SWAPS):
        return
    set_pause_state, look_up = Scheduler.set_pause_state, Scheduler._get_local_prefix_cache_hit

    @functools.wraps(set_pause_state)
    def count_swaps(scheduler: Any, pause_state: Any) -> None:
        if pause_state is PauseState.UNPAUSED and scheduler.pause_state is not pause_state:
            scheduler._slipstream_swaps += 1  # nothing else pauses it
        set_pause_state(scheduler, pause_state)

    @functools.wraps(look_up)
    def of_this_version(scheduler: Any, request: Any) -> Any:
        current = salt(scheduler._slipstream_swaps)
        if request.cache_salt != current:
            request.cache_salt = current
            request.block_hashes = []
            request.update_block_hashes()
        return look_up(scheduler, request)

    setattr(Scheduler, _SWAPS, 0)
    Scheduler.set_pause_state, Scheduler._get_local_prefix_cache_hit = count_swaps, of_this_version
