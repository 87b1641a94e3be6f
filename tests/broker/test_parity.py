"""The ledger in Python, the same with its SQLite file, and the ledger in Lua are one machine (triplets.py)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.broker.folders import in_memory
from tests.broker.triplets import Triplets

EXAMPLES = int(os.environ.get("LEDGER_EXAMPLES", "500"))  # a nightly run asks for 2000


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_ledgers_do_the_same_whatever_crashes(redis_server: Any, make: Any, part: int) -> None:
    """In memory: what SIGKILL leaves of a file is for tests/drills."""
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        check(part, redis_server.url, make, Path(folder))


def check(part: int, url: str, make: Any, folder: Path) -> None:
    @seed(part)
    def machine() -> Triplets:
        return Triplets(url, make, folder)

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES // 4,
            stateful_step_count=16,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # 16 steps can be read as they are; shrinking them takes longer than the test
        ),
    )
