"""``python -m launch.verify_run RUN_DIR``: whether a finished run kept its promises; for CI.

Prints one line a claim and exits with 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.load import load
from telemetry.live import number
from telemetry.sink import read_jsonl

_EDGE_STEPS = 10


def main(argv: list[str] | None = None) -> int:
    """Checks one run folder."""
    parser = argparse.ArgumentParser(prog="launch.verify_run", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--min-reward", type=float, default=float("-inf"), help="mean of the last steps")
    parser.add_argument("--max-start-reward", type=float, default=float("inf"), help="mean of the first steps")
    parser.add_argument("--max-staleness", type=int, required=True, help="no step trained a token older than this")
    args = parser.parse_args(argv)
    claims = list(_claims(args.run_dir, args.min_reward, args.max_start_reward, args.max_staleness))
    for holds, text in claims:
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    return 0 if all(holds for holds, _ in claims) else 1


def _claims(run_dir: Path, min_reward: float, max_start: float, max_staleness: int) -> Iterator[tuple[bool, str]]:
    config = load(run_dir / "config.yaml")
    records = [record for record in read_jsonl(run_dir / "logs" / "metrics.jsonl") if "step" in record]
    records = [record for record in records if not record.get("skipped")]
    steps = [int(number(record, "step")) for record in records]
    expected = list(range(1, config.learner.total_steps + 1))
    yield steps == expected, f"metrics.jsonl has steps 1 to {expected[-1]} in order, found {len(steps)}"
    if not records:
        return
    rewards = [number(record, "reward_mean") for record in records]
    edge = min(_EDGE_STEPS, len(rewards))
    first, last = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
    yield first <= max_start, f"reward of the first {edge} steps {first:.3f}, at most {max_start}"
    yield last >= min_reward, f"reward of the last {edge} steps {last:.3f}, at least {min_reward}"
    oldest = max(number(record, "staleness_max") for record in records)
    yield oldest <= max_staleness, f"oldest trained token {oldest:.0f} versions, at most {max_staleness}"
    for name in ("reward.png", "actor/config.json"):
        yield (run_dir / name).is_file(), f"{name} is there"


if __name__ == "__main__":
    sys.exit(main())
