"""Runs of the real thing: `slipstream` in processes of its own, real engines, real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running import SLIPSTREAM, Running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `slipstream <arguments>`, or a program given by its path; all of it is gone after the test."""
    started: list[Running] = []

    def begin(*arguments: str, env: dict[str, str] | None = None) -> Running:
        command = list(arguments) if arguments[0].startswith("/") else [SLIPSTREAM, *arguments]
        started.append(Running(command, tmp_path / f"output{len(started)}.txt", env))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
