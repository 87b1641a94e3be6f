"""What every test may rely on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT and SIGHUP mean what they mean at a terminal, here and in every child.

    A shell starts background jobs with SIGINT ignored, nohup its command with SIGHUP ignored; children inherit that,
    and our processes rightly respect it.
    """
    ordinary = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [each for each in ordinary if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, ordinary[each])
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
