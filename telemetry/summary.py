"""The last screen of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.messages import Counts
from telemetry.live import number
from telemetry.sink import read_jsonl


def summarize(
    run_dir: Path,
    *,
    total_steps: int,
    max_staleness: int,
    wall_s: float,
    counts: Counts | None,
    since: float = 0.0,
    resumed: bool = False,
) -> str:
    """One screen of text about a run that has ended, from its metrics and the ledger's last counts.

    Means and extremes are of the session that began at ``since`` (seconds since 1970), as the wall time is.
    """
    metrics = run_dir / "logs" / "metrics.jsonl"
    whole = [record for record in read_jsonl(metrics) if "step" in record]
    records = [record for record in whole if number(record, "time") >= since]
    session = f", {len(records)} steps in this session" if resumed else ""
    rows = [("steps", f"{_last(whole, 'step'):.0f} of {total_steps}{session}"), ("wall time", f"{wall_s:.1f} s")]
    if records:
        rows += _training(records, max_staleness)
    evals = {number(record, "policy_version"): record for record in read_jsonl(metrics.with_name("eval.jsonl"))}
    rows += [
        (f"eval at version {version:.0f}", f"reward {number(record, 'reward_mean'):.3f}")
        for version, record in sorted(evals.items())
        if number(record, "time") >= since
    ]
    if counts:
        verdict = "balanced" if counts.balanced() else f"NOT balanced: the states add up to {counts.total()}"
        rows.append(("ledger", f"{counts.fed} prompts fed, {verdict}"))
    rows += [(name, str(run_dir / name)) for name in ("logs", "checkpoints", "actor") if (run_dir / name).is_dir()]
    if (run_dir / "reward.png").is_file():
        rows.append(("plot", str(run_dir / "reward.png")))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _training(records: Sequence[Mapping[str, object]], max_staleness: int) -> list[tuple[str, str]]:
    edge = min(10, len(records))
    first, last = (_mean(part, "reward_mean") for part in (records[:edge], records[-edge:]))
    tokens = sum(number(record, "trained_tokens") for record in records)
    stale, trained = (sum(number(record, key) for record in records) for key in ("stale_groups", "groups"))
    oldest = max(number(record, "staleness_max") for record in records)
    return [
        ("reward", f"{first:.3f} -> {last:.3f} (means of the first and last {edge} steps)"),
        ("trained tokens", f"{tokens:,.0f}"),
        ("staleness", f"max {oldest:.0f}, bound {max_staleness}"),
        ("masked", f"{_mean(records, 'masked_share'):.2%} of tokens in the batches"),
        ("stale groups", f"{stale:.0f} thrown away whole, {stale / max(1.0, stale + trained):.2%} of those delivered"),
        ("learner waits", f"{_mean(records, 'idle_share'):.0%} of a step"),
        ("sampling stops", _stall(records)),
    ]


def _stall(records: Sequence[Mapping[str, object]]) -> str:
    """How long an update of the weights keeps the slowest generator from sampling, and of the steps' wall time."""
    stall_s, step_s = (_mean(records, name) for name in ("sync_stall_s", "step_s"))
    return f"{stall_s * 1000:.1f} ms an update, {stall_s / step_s if step_s else 0.0:.2%} of a step"


def _mean(records: Sequence[Mapping[str, object]], key: str) -> float:
    return sum(number(record, key) for record in records) / len(records)


def _last(records: Sequence[Mapping[str, object]], key: str) -> float:
    return number(records[-1], key) if records else 0.0
