"""reward.png: the reward, the staleness and the masked share over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from telemetry.live import number
from telemetry.sink import read_jsonl


def plot_run(metrics: Path, output: Path, *, max_staleness: int, title: str = "") -> bool:
    """Draws ``output`` from a run's metrics.jsonl and the eval.jsonl beside it; False when there is no step yet."""
    records = [record for record in read_jsonl(metrics) if "step" in record]
    if not records:
        return False
    evals = [record for record in read_jsonl(metrics.with_name("eval.jsonl")) if record.get("eval")]
    steps = _column(records, "step")
    figure = Figure(figsize=(8, 5.5), layout="constrained")  # not pyplot: no display, no global figures
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    rewards = _column(records, "reward_mean")
    top.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1)
    top.plot(steps, _smooth(rewards), color="tab:blue", label="reward (training)")
    if evals:
        top.plot(_column(evals, "policy_version"), _column(evals, "reward_mean"), "o", color="tab:green", label="eval")
    top.set_ylabel("reward")
    top.set_title(title)
    top.grid(alpha=0.3)
    top.legend(loc="best")
    bottom.step(steps, _column(records, "staleness_max"), where="mid", color="tab:red", label="staleness, max")
    bottom.plot(steps, _column(records, "staleness_mean"), color="tab:orange", label="staleness, mean")
    bottom.axhline(max_staleness, color="black", linestyle=":", linewidth=1, label="bound")
    bottom.plot(steps, _column(records, "masked_share"), color="tab:gray", label="masked share")
    bottom.set_ylim(-0.05, 1.6 * max(max_staleness, *_column(records, "staleness_max"), 0.1))  # room for the legend
    bottom.set_xlabel("policy version")
    bottom.grid(alpha=0.3)
    bottom.legend(loc="upper left", ncols=4, fontsize="small")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    return True


def _column(records: Sequence[Mapping[str, object]], key: str) -> list[float]:
    return [number(record, key) for record in records]


def _smooth(values: Sequence[float], window: int = 7) -> list[float]:
    """Mean of each value and up to ``window`` - 1 before it."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]
