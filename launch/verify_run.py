"""``python -m launch.verify_run RUN_DIR``: whether a finished run kept its promises; for CI.

Prints one line a claim and exits with 1 when one does not hold, with 2 when there is no run to judge.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from configs.load import ConfigError, load
from configs.run import RunConfig
from telemetry.live import number
from telemetry.sink import read_jsonl

_EDGE_STEPS = 10
_COLUMNS = ("step", "reward_mean", "staleness_max")
_LARGEST = 1e15  # of a number that anything is told by

Claim = tuple[bool, str]


def main(argv: list[str] | None = None) -> int:
    """Checks one run folder."""
    parser = argparse.ArgumentParser(prog="launch.verify_run", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--min-reward", type=float, default=float("-inf"), help="mean of the last steps")
    parser.add_argument("--max-start-reward", type=float, default=float("inf"), help="mean of the first steps")
    parser.add_argument(
        "--max-staleness", type=int, help="no step trained a token older than this; default: the run's own bound"
    )
    args = parser.parse_args(argv)
    try:
        config = load(args.run_dir / "config.yaml")
        claims = list(_claims(args.run_dir, config, args))
    except (ConfigError, OSError) as error:
        print(f"launch.verify_run: {args.run_dir} is no run that can be judged: {error}", file=sys.stderr)
        return 2
    for holds, text in claims:
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    return 0 if all(holds for holds, _ in claims) else 1


def _claims(run_dir: Path, config: RunConfig, args: argparse.Namespace) -> Iterator[Claim]:
    try:
        records = [one for one in read_jsonl(run_dir / "logs" / "metrics.jsonl") if not _is_skipped(one)]
    except (ValueError, RecursionError) as error:
        yield False, f"metrics.jsonl holds one JSON object a line, found {error or 'something else'}"
        return
    if broken := [str(one)[:100] for one in records if not _is_whole(one)]:
        yield False, f"every step has finite numbers as {', '.join(_COLUMNS)}, found {broken[0]}"
        return
    total = config.learner.total_steps
    in_order = len(records) == total and all(number(one, "step") == i for i, one in enumerate(records, start=1))
    yield in_order, f"metrics.jsonl has steps 1 to {total} in order, found {len(records)}"
    if records:
        yield from _values(records, config, args)
    for name in ("reward.png", "actor/config.json"):
        yield (run_dir / name).is_file(), f"{name} is there"


def _is_skipped(record: object) -> bool:
    """Whether the line is about a step that was not applied, or about no step."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{record!r:.100}")
    return "step" not in record or bool(record.get("skipped"))


def _is_whole(record: Mapping[str, object]) -> bool:
    values = [record.get(name) for name in _COLUMNS]
    return all(isinstance(value, (int, float)) and abs(value) <= _LARGEST for value in values)


def _values(records: list[dict[str, object]], config: RunConfig, args: argparse.Namespace) -> Iterator[Claim]:
    rewards = [number(record, "reward_mean") for record in records]
    edge = min(_EDGE_STEPS, len(rewards))
    first, last = sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge
    yield (
        first <= args.max_start_reward,
        f"reward of the first {edge} steps {first:.3f}, at most {args.max_start_reward}",
    )
    yield last >= args.min_reward, f"reward of the last {edge} steps {last:.3f}, at least {args.min_reward}"
    oldest = max(number(record, "staleness_max") for record in records)
    bound = config.rollout.max_staleness if args.max_staleness is None else args.max_staleness
    yield oldest <= bound, f"oldest trained token {oldest:.0f} versions, at most {bound}"


if __name__ == "__main__":
    sys.exit(main())
