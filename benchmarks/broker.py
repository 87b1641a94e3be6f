"""How fast the broker is, beside what it is built on: `python -m benchmarks.broker`.

    throughput   groups of 8 x 1,024 tokens a second, beside bare pyzmq and bare redis-py moving the same bytes
    generators   a thousand generators: latency of a lease, errors, the staleness bound
    memory       what the broker keeps of 200,000 groups that go through it, after as many to warm up
    lease_cost   a lease with 100 to 100,000 prompts queued

Ours and the reference are measured in one run and in turns, since the machine is noisy. A missed target is printed as
MISS and ends with status 1 only with --strict.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.figures import Figure, line, save
from benchmarks.lease_cost import lease_cost
from benchmarks.machine import machine
from benchmarks.many_generators import many_generators
from benchmarks.memory import memory
from benchmarks.processes import Backend
from benchmarks.throughput import throughput

MEASURES: dict[str, Callable[[Backend, bool], list[Figure]]] = {
    "throughput": throughput,
    "generators": many_generators,
    "memory": memory,
    "lease_cost": lease_cost,
}
BACKENDS: dict[str, tuple[Backend, ...]] = {"zmq": ("zmq",), "redis": ("redis",), "all": ("zmq", "redis")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measures asked for and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=MEASURES, help="one measure instead of all")
    parser.add_argument("--backend", choices=BACKENDS, default="all")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes: shows that it runs, not how fast"
    )
    parser.add_argument("--strict", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here too")
    options = parser.parse_args(arguments)
    here = machine()
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    figures: list[Figure] = []
    for name in [options.only] if options.only else MEASURES:
        start = time.monotonic()
        for backend in BACKENDS[options.backend]:
            for figure in MEASURES[name](backend, options.quick):
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
