"""The learner's batching and arithmetic, measured with what they are compared with: `python -m benchmarks.learner`.

    trl     tokens trained a second, beside TRL's GRPO trainer on the same rows (needs the packages of `peers`)
    bare    the same, beside forward, backward and AdamW on rows without any padding
    memory  of the log-probabilities, as the vocabulary grows
    zero3   two ZeRO-3 ranks of one thread, beside one rank of two

SmolLM2-135M in float32, answers of 20 to 400 tokens. Every measure runs both sides itself, taking turns. A target that
is not met is printed as MISS and ends with status 1 only with --strict; where TRL is not installed, `trl` says how to
install it and the status is 1.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.figures import BenchmarkError, Figure, spread
from benchmarks.learner_rows import Setup, prepared
from benchmarks.learner_sides import Side, bare, ours, sides, trl, turns
from benchmarks.report import parser_for, report

ROUNDS, QUICK_ROUNDS = 3, 1
THREADS = 2
PEERS = "TRL is not installed: pip install --group peers (of pyproject.toml; pip 25.1 or newer)"


def _beside(name: str, target: float, other: Callable[..., Callable[[], object]], quick: bool) -> list[Figure]:
    """Tokens trained a second by our learner and by another, at least ``target`` times as many."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with prepared(quick) as setup:
        pair = [lambda make=make: Side(make, setup, threads=THREADS) for make in (ours, other)]
        with sides(*pair) as started:
            mine, theirs = turns(started, rounds)
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    return [_rates(name, setup, mine, theirs, ratios, target)]


def _rates(
    name: str, setup: Setup, mine: Sequence[float], theirs: Sequence[float], ratios: Sequence[float], target: float
) -> Figure:
    ratio = statistics.median(ratios)
    return Figure(
        measure=name, backend="gloo", name=f"step beside {name}", unit="tokens/s",
        ours=setup.loss_tokens / statistics.median(mine), reference=setup.loss_tokens / statistics.median(theirs),
        ratio=ratio, target=f">= {target:g}", passed=ratio >= target,
        note=f"{setup.note()}, of which {setup.loss_tokens} are trained; ratios {spread(ratios)}",
    )  # fmt: skip


def beside_trl(quick: bool) -> list[Figure]:
    """Our step and TRL's. Raises BenchmarkError where it is not installed."""
    if not all(map(importlib.util.find_spec, ("trl", "accelerate", "datasets"))):
        raise BenchmarkError(PEERS)
    return _beside("trl", 1.5, trl, quick)


def beside_bare(quick: bool) -> list[Figure]:
    """Our step and a bare one on rows without padding."""
    return _beside("bare", 0.85, bare, quick)


def zero3(quick: bool) -> list[Figure]:
    """Seconds of a step on two ranks of a thread each, beside the same on one rank of two threads."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with (
        prepared(quick) as setup,
        sides(lambda: Side(ours, setup, threads=1, ranks=2), lambda: Side(ours, setup, threads=THREADS)) as started,
    ):
        two, one = turns(started, rounds)
    ratios = [a / b for a, b in zip(two, one, strict=True)]
    ratio = statistics.median(ratios)
    return [
        Figure(
            measure="zero3", backend="gloo", name="2 ranks x 1 thread beside 1 x 2", unit="s a step",
            ours=statistics.median(two), reference=statistics.median(one), ratio=ratio,
            target="<= 1.15", passed=ratio <= 1.15, note=f"{setup.note()}; ratios {spread(ratios)}",
        )
    ]  # fmt: skip


_MEMORY = """
import re, sys, torch
from pathlib import Path
from learners.token_head import chunked_logprobs
V, N, H, ours = *map(int, sys.argv[1:4]), sys.argv[4] == "ours"
torch.set_num_threads(1)
hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
ids = torch.randint(0, V, (N,))
def logprobs(rows):
    if ours:
        return chunked_logprobs(hidden[:rows], weight, None, ids[:rows], temperature=1.0)[0]
    table = torch.nn.functional.linear(hidden[:rows], weight).log_softmax(-1)
    return table.gather(-1, ids[:rows, None])
def kib(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
logprobs(4).sum().backward()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kib("VmRSS")
logprobs(N).sum().backward()
print(1024 * (kib("VmHWM") - before))
"""


def memory(quick: bool) -> list[Figure]:
    """Bytes that forward and backward of the log-probabilities add, beside a table of all logits."""
    N, H = (512, 16) if quick else (2048, 64)
    grown: dict[int, tuple[float, float]] = {}
    for vocabulary in (32_768, 65_536, 131_072):
        ours_bytes, table_bytes = (_grown(vocabulary, N, H, side) for side in ("ours", "table"))
        grown[vocabulary] = (ours_bytes, table_bytes)
    flat = max(mine for mine, _ in grown.values()) / min(mine for mine, _ in grown.values())
    return [
        Figure(
            measure="memory", backend="-", name=f"log-probabilities, {vocabulary >> 10}k words", unit="MiB",
            ours=mine / 2**20, reference=table / 2**20, ratio=mine / table, note=f"{N} tokens, hidden size {H}",
        )
        for vocabulary, (mine, table) in grown.items()
    ] + [
        Figure(
            measure="memory", backend="-", name="the most over the vocabularies", unit="of the least",
            ours=flat, target="<= 1.5", passed=flat <= 1.5,
        )
    ]  # fmt: skip


def _grown(*arguments: object) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise BenchmarkError(done.stderr)
    return float(done.stdout)


MEASURES: dict[str, Callable[[bool], list[Figure]]] = {
    "trl": beside_trl,
    "bare": beside_bare,
    "memory": memory,
    "zero3": zero3,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measures asked for and returns the exit status."""
    options = parser_for("benchmarks.learner", __doc__, MEASURES).parse_args(arguments)
    try:
        return report({name: [partial(take, options.quick)] for name, take in MEASURES.items()}, options)
    except BenchmarkError as error:
        print(f"benchmarks.learner: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
