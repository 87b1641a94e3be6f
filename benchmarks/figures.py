"""What a measure hands back, how it is printed and how it is kept as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path


class BenchmarkError(Exception):
    """A measure could not be taken; the text says which wait or count went wrong."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number beside what it is compared with.

    Attributes:
        reference: the same measure of the thing compared with, None where the target is a bare limit.
        ratio: ours to the reference.
        target: the target in words, empty for a number that is only told.
        passed: whether the target is met, None without a target.
        note: spread, settings, definition.
    """

    measure: str
    backend: str
    name: str
    unit: str
    ours: float
    reference: float | None = None
    ratio: float | None = None
    target: str = ""
    passed: bool | None = None
    note: str = ""


def line(figure: Figure) -> str:
    """One figure as a line of text, its note below."""
    reference = "-" if figure.reference is None else _short(figure.reference)
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.3f}"
    verdict = {None: "", True: "pass", False: "MISS"}[figure.passed]
    return (
        f"{figure.backend:<6} {figure.name:<36} ours {_short(figure.ours):>10}  ref {reference:>10} {figure.unit:<18} "
        f"ratio {ratio:>6}  {figure.target:<24} {verdict}"
    ).rstrip() + (f"\n{'':<18}{figure.note}" if figure.note else "")


def save(path: Path, figures: Sequence[Figure], machine: dict[str, object]) -> None:
    """Writes everything measured as JSON."""
    content = {"machine": machine, "figures": [asdict(figure) for figure in figures]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def spread(values: Sequence[float]) -> str:
    """The range of several rounds, for a note."""
    return f"[{_short(min(values))} … {_short(max(values))}]"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie (nearest rank)."""
    if not values:
        raise BenchmarkError("no values to take a percentile of")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope and its standard error, widened for residuals that follow each other (AR(1)).

    Memory moves in steps, so neighbouring samples are not independent: with lag-1 autocorrelation r the number of
    independent samples is n (1 - r) / (1 + r), and the naive error is too small by the root of that factor.
    """
    n = len(x)
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread_x = sum((a - mean_x) ** 2 for a in x)
    value = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread_x
    residuals = [b - mean_y - value * (a - mean_x) for a, b in zip(x, y, strict=True)]
    squares = sum(one * one for one in residuals)
    if squares == 0.0:
        return value, 0.0
    follows = sum(a * b for a, b in pairwise(residuals)) / squares
    follows = min(max(follows, 0.0), 0.99)
    return value, float((squares / (n - 2) / spread_x * (1 + follows) / (1 - follows)) ** 0.5)


def _short(value: float) -> str:
    if value != 0 and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
