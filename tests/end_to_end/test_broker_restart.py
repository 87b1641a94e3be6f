"""A broker that comes back with nothing in its memory, under a learner and a generator that were started by hand."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.running import SMALL, Running, metrics

pytestmark = pytest.mark.slow


def test_a_run_goes_on_when_its_broker_has_lost_its_memory_twice(start: Callable[..., Running], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = [
        "-c", "quickstart", f"output_dir={tmp_path}", "learner.total_steps=24", "generator.engine=transformers",
        "learner.ranks=1", "learner.delay_s=0.4", f"broker.port={port}", *SMALL,
    ]  # fmt: skip
    run_dir = tmp_path / "slipstream" / "quickstart"
    broker = start("broker", *common)
    broker.until(lambda: "broker ready" in broker.text(), 30, "the broker's address")
    learner, generator = start("learner", *common), start("generator", *common, "--id", "a")
    for steps in (4, 10):
        learner.until(lambda steps=steps: len(metrics(run_dir)) >= steps, 120, f"{steps} steps")
        broker.process.send_signal(signal.SIGKILL)
        broker.process.wait(10)
        broker = start("broker", *common)
    assert learner.wait(180) == 0, learner.text()[-3000:] + generator.text()[-2000:]
    assert generator.wait(30) == 0, generator.text()[-3000:]
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 25))
    assert learner.text().count("the broker has lost its memory") == 2
    broker.process.send_signal(signal.SIGTERM)
    assert broker.wait(10) == 143
