"""What one step leaves behind: the metrics line, and how long its parts took."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import psutil

from broker.messages import Batch, Completion, Counts, Group, RunState
from learners.advantages import zero_variance
from learners.staleness import Staleness
from learners.stats import StepStats
from weights_sync.stats import PublishStats


class Stopwatch:
    """Splits a step's wall time into named parts, in seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """The time since the last lap went into ``part``."""
        now = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """``<part>_s`` since the last reading, and as ``step_s`` their sum without the evaluation, which is no step."""
        parts = {f"{part}_s": seconds for part, seconds in self._parts.items()}
        self._parts = {}
        return parts | {"step_s": sum(seconds for part, seconds in parts.items() if part != "eval_s")}


class StaleGroups:
    """Groups that the broker has thrown away whole, by step: it counts them over the run, and a step's are those new.

    ``counts``: of before the first step.
    """

    def __init__(self, counts: Counts) -> None:
        self._seen = counts.thrown_away()

    def since(self, counts: Counts) -> int:
        """How many there are since the last call; a broker that came back without its memory counts from zero."""
        before, self._seen = self._seen, counts.thrown_away()
        return self._seen - before if self._seen >= before else self._seen


OF_STEP_STATS = (
    *("loss", "grad_norm", "lr", "ratio_mean", "ratio_max", "clip_fraction", "ess_share", "sequence_ratio_max"),
    *("rejected_share", "kl_behavior", "kl_behavior_k1", "entropy", "updates", "skipped_updates"),
)


def metrics(
    *,
    batch: Batch,
    staleness: Staleness,
    stats: StepStats,
    trained_tokens: int,
    micro_batches: int,
    padding_share: float,
    stale_groups: int,
    times: Mapping[str, float],
) -> dict[str, object]:
    """One line of metrics.jsonl; ``step`` is the policy version after the step, the axis of every metric.

    ``trained_tokens``: those that carried loss; fewer than the bound allowed where groups or completions are left out.
    """
    completions = [one for group in batch.groups for one in group.completions]
    rewards = np.array([one.reward for one in completions])
    step_s = max(times["step_s"], 1e-9)
    return {
        "step": stats.version,
        "policy_version": stats.version,
        "incarnation": batch.incarnation,
        "time": time.time(),
        "reward_mean": _mean(rewards),
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "reward_parts": reward_parts(completions),
        **{name: getattr(stats, name) for name in OF_STEP_STATS},
        **stats.parts,
        "response_length_mean": _mean([len(one.token_ids) for one in completions]),
        "truncated_share": _mean([one.finish_reason == "length" for one in completions]),
        "masked_share": staleness.masked_share,
        "stale_groups": stale_groups,
        "trained_tokens": trained_tokens,
        "staleness_max": staleness.oldest,
        "staleness_mean": staleness.mean,
        "staleness_histogram": {str(age): count for age, count in staleness.histogram.items()},
        "train_tokens_per_s": trained_tokens / step_s,
        "wait_s": times.get("wait_s", 0.0),
        "train_s": times.get("train_s", 0.0),
        "publish_s": times.get("publish_s", 0.0),
        "eval_s": times.get("eval_s", 0.0),
        "step_s": times["step_s"],
        "idle_share": times.get("wait_s", 0.0) / step_s,
        "groups": len(batch.groups),
        "samples": len(completions),
        "micro_batches": micro_batches,
        "padding_share": padding_share,
        "zero_variance_groups": sum(zero_variance([c.reward for c in group.completions]) for group in batch.groups),
        "failed_completions": sum(group.failed_completions for group in batch.groups),
        "skipped": not stats.applied,
    }


def fill(state: RunState) -> dict[str, object]:
    """Of a step's line: what the broker holds after it, the memory of the processes, and what the last swap took."""
    counts, rules = state.counts, state.rules
    rss_bytes, stall_s = (
        max((member.stats.get(name, 0.0) for member in state.members), default=0.0)
        for name in ("rss_bytes", "swap_stall_s")
    )
    return {
        "queued": counts.queued,
        "leased": counts.leased,
        "buffered": counts.buffered,
        "buffer_bytes": state.buffered_bytes,
        "buffer_fill": state.buffered_bytes / rules.max_buffer_bytes if rules else 0.0,
        "rss_bytes": psutil.Process().memory_info().rss,
        "generator_rss_bytes_max": rss_bytes,
        "sync_stall_s": stall_s,
    }


def synced(stats: PublishStats) -> dict[str, object]:
    """Of a step's line: the last version that every receiver of its attempt has taken."""
    return {
        "sync_version": stats.version,
        "sync_s": stats.seconds,
        "sync_wire_bytes": stats.wire_bytes,
        "sync_whole_bytes": stats.payload_bytes,
        "sync_failed_attempts": stats.failed_attempts,
    }


def evaluation_line(groups: Sequence[Group], *, version: int, count: int) -> dict[str, object]:
    """One line of eval.jsonl: the answers to ``count`` prompts under one policy version (C119)."""
    completions = [one for group in groups for one in group.completions]
    return {
        "eval": True,
        "step": version,
        "policy_version": version,
        "reward_mean": _mean([one.reward for one in completions]),
        "reward_parts": reward_parts(completions),
        "count": count,
        "missing": count - sum(bool(group.completions) for group in groups),
        "time": time.time(),
    }


def reward_parts(completions: Iterable[Completion]) -> dict[str, float]:
    """Mean of each named part over the completions that have it."""
    parts: dict[str, list[float]] = {}
    for completion in completions:
        for name, value in completion.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in sorted(parts.items())}


def _mean(values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
