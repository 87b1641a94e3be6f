"""How fast weights get to the generators, beside what it is built on: `python -m benchmarks.weight_sync`.

    wire      a whole version to 1, 2 and 4 receivers, beside a bare gloo broadcast of the same bytes and buckets
    update    what a sparse update costs to make and to apply, beside copying the version
    stall     what `offer` costs the learner, beside a copy of the same bytes and beside the peers' way
    control   messages around the payload of one publication
    sampling  how long vLLM gives no token for one update, beside its own in-place load of the same tensors
    reform    from the death of one of three receivers to the other two holding the version

Ours and the reference are measured in one run and in turns. A missed target is printed as MISS and ends with status 1
only with --strict.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.figures import Figure, line, save
from benchmarks.machine import machine
from benchmarks.sync_reform import control, reform
from benchmarks.sync_sampling import sampling
from benchmarks.sync_stall import stall
from benchmarks.sync_update import update
from benchmarks.sync_wire import wire

MEASURES: dict[str, Callable[[bool], list[Figure]]] = {
    "wire": wire,
    "update": update,
    "stall": stall,
    "control": control,
    "reform": reform,
    "sampling": sampling,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measures asked for and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_sync", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", choices=MEASURES, help="one measure instead of all")
    parser.add_argument("--quick", action="store_true", help="small tensors: shows that it runs, not how fast")
    parser.add_argument("--strict", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here too")
    options = parser.parse_args(arguments)
    here = machine()
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    figures: list[Figure] = []
    for name in [options.only] if options.only else MEASURES:
        start = time.monotonic()
        for figure in MEASURES[name](options.quick):
            figures.append(figure)
            print(f"{name:<10} {line(figure)}", flush=True)
        print(f"{name:<10} took {time.monotonic() - start:.0f} s", flush=True)
    missed = [one for one in figures if one.passed is False]
    told = [one for one in figures if one.passed is not None]
    print(f"{len(told) - len(missed)} of {len(told)} targets met")
    if options.json:
        save(options.json, figures, here)
    return 1 if missed and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
