"""Every published algorithm on the quickstart's task: `python -m benchmarks.algorithms`.

    algorithm        steps to 0.8   final reward   evaluation   staleness

Each is one run of the serial mode with the quickstart's model, task, budget and learning rate, a bound of one step that
is always used up, and the settings of its recipe. The rewards are means over ten steps, the evaluation is greedy. It
tells which learn at all; the learning rate is not tuned for any of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.curves import ENOUGH, final_reward, numbers, steps_to_enough
from benchmarks.machine import machine
from configs import dialect
from configs.presets import DEFAULT, PRESETS
from learners.recipes import RECIPES
from telemetry.sink import read_jsonl

_COMMON = [
    "launch.mode=serial",
    "generator.engine=transformers",
    "learner.ranks=1",
    "learner.eval.at_start=false",
    "learner.checkpoint.every_steps=0",
]


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a run came to. ``steps_to_enough``: the first step whose last ten have a mean reward of 0.8; None: never."""

    recipe: str
    seed: int
    steps_to_enough: int | None
    final_reward: float
    evaluation: float
    staleness: float


def learned(recipe: str, *, seed: int, steps: int | None, directory: Path) -> Learned:
    """Runs a recipe to its end. ``steps``: instead of the quickstart's."""
    config = dialect.parse((PRESETS / f"{DEFAULT}.yaml").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    config["algorithm"] = {"recipe": recipe, "entropy_coef": config["algorithm"]["entropy_coef"]}
    file = directory / "run.yaml"
    file.write_text(dialect.render(config), encoding="utf-8")
    settings = [
        f"output_dir={directory}",
        f"seed={seed}",
        *([f"learner.total_steps={steps}"] if steps else []),
        *_COMMON,
    ]
    subprocess.run(
        [sys.executable, "-m", "launch.cli", "up", "-c", file, *settings], check=True, stdout=subprocess.DEVNULL
    )
    logs = directory / config["project"] / config["experiment"] / "logs"
    lines, evals = (read_jsonl(logs / name) for name in ("metrics.jsonl", "eval.jsonl"))
    rewards = numbers(lines, "reward_mean")
    return Learned(
        recipe=recipe,
        seed=seed,
        steps_to_enough=steps_to_enough(rewards),
        final_reward=final_reward(rewards),
        evaluation=numbers(evals, "reward_mean")[-1],
        staleness=fmean(numbers(lines, "staleness_mean")),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line a run, as they end; status 1 with --strict when one does not reach 0.8."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", choices=RECIPES, nargs="+", default=list(RECIPES), help="these instead of all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with seeds from 0")
    parser.add_argument("--steps", type=int, help="instead of the quickstart's")
    parser.add_argument("--strict", action="store_true", help="status 1 when one does not reach 0.8")
    options = parser.parse_args(arguments)
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    print(f"{'algorithm':<22} seed  steps to {ENOUGH}  final reward  evaluation  mean staleness", flush=True)
    missed = 0
    for recipe in options.only:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as directory:
                one = learned(recipe, seed=seed, steps=options.steps, directory=Path(directory))
            missed += one.steps_to_enough is None
            print(
                f"{recipe:<22} {seed:>4}  {one.steps_to_enough or 'never':>12}  {one.final_reward:>12.3f}  "
                f"{one.evaluation:>10.3f}  {one.staleness:>14.2f}",
                flush=True,
            )
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
