"""The weight sync's benchmark runs to its end and tells every figure, in its smallest form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOLD = {
    "wire": {f"whole version, {count} receivers" for count in (1, 2, 4)},
    "transports": {
        f"whole by {transport}, {count} receivers" for transport in ("collective", "disk", "relay") for count in (1, 2)
    },
    "update": {f"{what}, {share} % changed" for what in ("bytes", "making it", "applying it") for share in (0.1, 1, 7)},
    "stall": {"beside a copy of its shards", "beside gather and broadcast"},
    "control": {"publication of 30 tensors", "publication of 300 tensors"},
    "reform": {"3 receivers to 2, beyond detection"},
    "sampling": {"stall of an update, tiny model"},
}


@pytest.mark.slow
def test_a_quick_run_tells_every_figure_and_keeps_it(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weight_sync", "--quick", "--json", str(kept)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(kept.read_text())["figures"]
    for measure, names in TOLD.items():
        assert {figure["name"] for figure in figures if figure["measure"] == measure} == names
    for figure in figures:
        assert f"{figure['measure']:<10} {figure['backend']:<6} {figure['name']}" in done.stdout
    messages = [figure["ours"] for figure in figures if figure["measure"] == "control"]
    assert messages == [5, 5], "whatever the number of tensors"
