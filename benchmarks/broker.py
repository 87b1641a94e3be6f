"""How fast the broker is, beside what it is built on: `python -m benchmarks.broker`.

    throughput   groups of 8 x 1,024 tokens a second, beside bare pyzmq and bare redis-py moving the same bytes
    generators   a thousand generators: latency of a lease, errors, the staleness bound
    memory       what the broker keeps of 200,000 groups that go through it, after as many to warm up
    lease_cost   a lease with 100 to 100,000 prompts queued

Ours and the reference are measured in one run and in turns, since the machine is noisy. A missed target is printed as
MISS and ends with status 1 only with --strict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.figures import Figure
from benchmarks.lease_cost import lease_cost
from benchmarks.many_generators import many_generators
from benchmarks.memory import memory
from benchmarks.processes import Backend
from benchmarks.report import parser_for, report
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
    parser = parser_for("benchmarks.broker", __doc__, MEASURES)
    parser.add_argument("--backend", choices=BACKENDS, default="all")
    options = parser.parse_args(arguments)
    backends = BACKENDS[options.backend]
    return report(
        {name: [partial(take, one, options.quick) for one in backends] for name, take in MEASURES.items()}, options
    )


if __name__ == "__main__":
    sys.exit(main())
