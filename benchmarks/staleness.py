"""What staleness costs, on the quickstart's task: `python -m benchmarks.staleness`.

    tail         on_stale=mask against drop, η = 2, completions with a log-normal artificial time: time, steps and
                 trained tokens to a mean reward of 0.8
    correction   η = 0, η = 4 with the correction and η = 4 without: the final reward

`tail` is separate processes and a clock; `correction` is the serial mode, where tokens are always as old as η allows.
Rewards are means over ten steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.curves import ENOUGH, final_reward, numbers, steps_to_enough
from benchmarks.machine import machine
from configs import dialect
from configs.presets import DEFAULT, PRESETS
from telemetry.sink import read_jsonl

_COMMON = (
    "generator.engine=transformers",
    "learner.ranks=1",
    "learner.eval.at_start=false",
    "learner.eval.at_end=false",
    "learner.checkpoint.every_steps=0",
    "telemetry.live=false",
)
_TAIL = (
    *("rollout.max_staleness=2", "rollout.completions_per_group=12", "generator.count=1"),
    *("generator.groups_in_flight=24", "generator.completion_delay_s=0.3", "generator.completion_delay_sigma=1.0"),
)
_SERIAL = ("launch.mode=serial",)
MEASURES: dict[str, dict[str, tuple[str, ...]]] = {
    "tail": {f"on_stale={kind}": (*_TAIL, f"rollout.on_stale={kind}") for kind in ("mask", "drop")},
    "correction": {
        "staleness 0": (*_SERIAL, "rollout.max_staleness=0"),
        "staleness 4, truncate": (*_SERIAL, "rollout.max_staleness=4"),
        "staleness 4, none": (*_SERIAL, "rollout.max_staleness=4", "algorithm.correction.kind=none"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. ``seconds``, ``steps`` and ``tokens`` (trained) are to a mean reward of 0.8; None: it never was there.

    ``masked`` is the share of sampled tokens in the batches that the bound took, ``thrown_away`` that of groups that
    never came into one.
    """

    seconds: float | None
    steps: int | None
    tokens: int | None
    final_reward: float
    staleness: float
    masked: float
    thrown_away: float
    step_s: float


def outcome(lines: Sequence[Mapping[str, object]]) -> Outcome:
    """Of the lines of metrics.jsonl of a whole run. The time is from the end of the first step."""
    rewards, tokens, times = (numbers(lines, name) for name in ("reward_mean", "trained_tokens", "time"))
    steps = steps_to_enough(rewards)
    stale, groups = (sum(numbers(lines, name)) for name in ("stale_groups", "groups"))
    return Outcome(
        seconds=None if steps is None else times[steps - 1] - times[0],
        steps=steps,
        tokens=None if steps is None else int(sum(tokens[:steps])),
        final_reward=final_reward(rewards),
        staleness=fmean(numbers(lines, "staleness_mean")),
        masked=fmean(numbers(lines, "masked_share")),
        thrown_away=stale / max(1.0, stale + groups),
        step_s=fmean(numbers(lines, "step_s")),
    )


def run(settings: Sequence[str], *, seed: int, steps: int | None, directory: Path) -> Outcome:
    """Runs the quickstart with these settings to its end. ``steps``: instead of its own."""
    config = dialect.parse((PRESETS / f"{DEFAULT}.yaml").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    budget = [f"learner.total_steps={steps}"] if steps else []
    command = [sys.executable, "-m", "launch.cli", "up", "-c", str(PRESETS / f"{DEFAULT}.yaml")]
    subprocess.run(
        [*command, f"output_dir={directory}", f"seed={seed}", *budget, *_COMMON, *settings],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return outcome(read_jsonl(directory / config["project"] / config["experiment"] / "logs" / "metrics.jsonl"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line a run, as they end."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", choices=MEASURES, help="one measure instead of all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with seeds from 0")
    parser.add_argument("--steps", type=int, help="instead of the quickstart's")
    options = parser.parse_args(arguments)
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    print(
        f"{'run':<24} seed  s to {ENOUGH}  steps  trained tokens  final reward  staleness  masked  thrown away  s/step",
        flush=True,
    )
    for measure in [options.only] if options.only else MEASURES:
        for seed in range(options.seeds):
            for name, settings in MEASURES[measure].items():
                with tempfile.TemporaryDirectory() as directory:
                    one = run(settings, seed=seed, steps=options.steps, directory=Path(directory))
                seconds = "never" if one.seconds is None else f"{one.seconds:.1f}"
                print(
                    f"{name:<24} {seed:>4}  {seconds:>8}  {one.steps or 'never':>5}  {one.tokens or '':>14}  "
                    f"{one.final_reward:>12.3f}  {one.staleness:>9.2f}  {one.masked:>6.1%}  {one.thrown_away:>11.1%}  "
                    f"{one.step_s:>6.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
