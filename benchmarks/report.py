"""Runs measures one after the other, prints their figures as they come, and keeps them as JSON if asked to."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.figures import Figure, line, save
from benchmarks.machine import machine

Measure = Callable[[], Iterable[Figure]]


def parser_for(module: str, doc: str | None, measures: Iterable[str]) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--only", choices=measures, help="one measure instead of all")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs, not how fast")
    parser.add_argument("--strict", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here too")
    return parser


def report(measures: dict[str, Sequence[Measure]], options: argparse.Namespace) -> int:
    """Runs the measures asked for and returns the exit status."""
    here = machine()
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    figures = list(_told({name: measures[name] for name in [options.only] if name} or measures))
    judged = [one.passed for one in figures if one.passed is not None]
    print(f"{sum(judged)} of {len(judged)} targets met")
    if options.json:
        save(options.json, figures, here)
    return 1 if options.strict and not all(judged) else 0


def _told(measures: dict[str, Sequence[Measure]]) -> Iterator[Figure]:
    for name, parts in measures.items():
        start = time.monotonic()
        for measure in parts:
            for figure in measure():
                print(f"{name:<10} {line(figure)}", flush=True)
                yield figure
        print(f"{name:<10} took {time.monotonic() - start:.0f} s", flush=True)
