"""The error tree of everything that talks through the broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SlipstreamError(Exception):
    """Base of the errors that this project raises on purpose."""


class BrokerError(SlipstreamError):
    """A conversation with the broker failed."""


class BrokerClosed(BrokerError):
    """This side closed the connection."""


class BrokerUnreachable(BrokerError):
    """The broker did not answer within ``broker.reconnect_timeout_s``."""


class BufferFull(BrokerError):
    """The broker had no room for a group within ``broker.push_timeout_s``."""

    settled: Mapping[int, Any] = {}


class RunFinished(BrokerError):
    """The run has ended; there is nothing more to lease or to train."""


class Refused(BrokerError):
    """The broker understood the request and will not do it (malformed frame, wrong schema, abandoned policy).

    ``settled``: what became of the others, by place, where many groups were pushed together.
    """

    settled: Mapping[int, Any] = {}


class NoOpenRun(Refused):
    """The broker knows of no open run: it was restarted without its memory. Open the run and feed again."""
