"""What every test may rely on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT means what it means at a terminal, here and in every child.

    A shell starts background jobs with SIGINT ignored, children inherit that, and our processes rightly respect it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
