"""A broker that does not answer: one line soon, an error at the end of the patience."""

from __future__ import annotations

import logging
import math
import time

from broker.address import without_password
from broker.errors import BrokerUnreachable

log = logging.getLogger(__name__)

TELL_AFTER_S = 1.5  # long enough for a broker that is started again, short enough for a person who waits


class Silence:
    """How long an answer has been owed."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._since = math.inf
        self._told = False

    def asked(self) -> None:
        """An answer is owed from now on, if none was."""
        self._since = min(self._since, time.monotonic())

    def ended(self) -> None:
        """The broker has answered."""
        if self._told:
            log.info("the broker at %s answers again", without_password(self._url))
        self._since, self._told = math.inf, False

    def left_s(self) -> float:
        """Until ``check`` has something to say."""
        return self._since + (self._timeout_s if self._told else min(TELL_AFTER_S, self._timeout_s)) - time.monotonic()

    def check(self, why: str = "") -> None:
        """Says once that we wait and for how long. Raises BrokerUnreachable when that has been long enough."""
        waited, because = time.monotonic() - self._since, f": {why}" if why else ""
        if waited >= self._timeout_s:
            raise BrokerUnreachable(
                f"the broker at {without_password(self._url)} has been silent for broker.reconnect_timeout_s = "
                f"{self._timeout_s:g}; is it running, and is broker.url right?{because}"
            )
        if waited >= TELL_AFTER_S and not self._told:
            self._told = True
            log.warning(
                "waiting for the broker at %s, up to broker.reconnect_timeout_s = %g%s",
                without_password(self._url),
                self._timeout_s,
                because,
            )
