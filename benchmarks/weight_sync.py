"""How fast weights get to the generators, beside what it is built on: `python -m benchmarks.weight_sync`.

    wire      a whole version to 1, 2 and 4 receivers, beside a bare gloo broadcast of the same bytes and buckets
    transports the same by files and through the broker, with all that is around it, beside process groups
    update    what a sparse update costs to make and to apply, beside copying the version
    stall     what `offer` costs the learner, beside a copy of the same bytes and beside the peers' way
    control   messages around the payload of one publication
    sampling  how long vLLM gives no token for one update, beside its own in-place load of the same tensors
    reform    from the death of one of three receivers to the other two holding the version

Ours and the reference are measured in one run and in turns. A missed target is printed as MISS and ends with status 1
only with --strict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.figures import Figure
from benchmarks.report import parser_for, report
from benchmarks.sync_reform import control, reform
from benchmarks.sync_sampling import sampling
from benchmarks.sync_stall import stall
from benchmarks.sync_transports import transports
from benchmarks.sync_update import update
from benchmarks.sync_wire import wire

MEASURES: dict[str, Callable[[bool], list[Figure]]] = {
    "wire": wire,
    "transports": transports,
    "update": update,
    "stall": stall,
    "control": control,
    "reform": reform,
    "sampling": sampling,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measures asked for and returns the exit status."""
    options = parser_for("benchmarks.weight_sync", __doc__, MEASURES).parse_args(arguments)
    return report({name: [partial(take, options.quick)] for name, take in MEASURES.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
