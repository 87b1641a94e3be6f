"""The broker's benchmark runs to its end and tells every figure, in its smallest form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import slope

REPOSITORY = Path(__file__).parents[2]
TOLD = {
    "throughput": {"share of encode + decode", "processor time of the broker"},
    "generators": {"errors", "throughput", "lease, p99", "push, p99", "tokens beyond the staleness bound"},
    "memory": {"slope", "growth"},
    "lease_cost": {"lease + release, 100 queued", "lease + release, 1,000 queued"},
}
REFERENCES = {
    "zmq": {"against pyzmq relay, two hops", "against pyzmq PUSH-PULL, one hop"},
    "redis": {"against redis-py SET + GET"},
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zmq", pytest.param("redis", marks=pytest.mark.service)])
@pytest.mark.parametrize("measure", TOLD)
def test_a_quick_run_tells_every_figure_and_keeps_it(measure: str, backend: str, tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    options = ["--only", measure, "--backend", backend, "--quick", "--json", str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.broker", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    figures = {figure["name"]: figure for figure in json.loads(kept.read_text())["figures"]}
    wanted = TOLD[measure] | (REFERENCES[backend] if measure == "throughput" else set())
    assert wanted <= figures.keys()
    for name, figure in figures.items():
        assert (figure["measure"], figure["backend"]) == (measure, backend)
        assert f"{measure:<10} {backend:<6} {name}" in done.stdout
        assert isinstance(figure["ours"], int | float)
    for name in REFERENCES[backend] & figures.keys():
        assert figures[name]["reference"] > 0
        assert figures[name]["ratio"] == pytest.approx(figures[name]["ours"] / figures[name]["reference"])
    for name in ("errors", "tokens beyond the staleness bound"):  # right or wrong, however slow the machine is
        assert figures.get(name, {"ours": 0})["ours"] == 0


def test_a_slope_that_is_noise_is_within_its_error_and_one_that_is_not_is_outside() -> None:
    x = [float(i) for i in range(100)]
    noise = [float((7919 * i) % 101) for i in range(100)]
    value, error = slope(x, noise)
    assert abs(value) <= 2 * error
    value, error = slope(x, [3 * a + b for a, b in zip(x, noise, strict=True)])
    assert value == pytest.approx(3, abs=0.5)
    assert abs(value) > 2 * error
    assert slope(x, [5.0] * 100) == (0.0, 0.0)
