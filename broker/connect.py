"""From a broker's url to a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from broker.client import ZmqBroker
from broker.config import BrokerConfig
from broker.contract import Broker
from broker.errors import BrokerError

REDIS_SCHEMES = ("redis", "rediss", "unix")


def connect(config: BrokerConfig, url: str) -> Broker:
    """A client for one thread; it connects in the background and in the first call.

    Raises BrokerError for a url that names no broker.
    """
    scheme = urlsplit(url).scheme
    if scheme == "tcp":
        return ZmqBroker(config, url)
    if scheme in REDIS_SCHEMES:
        from broker.redis_backend import RedisBroker  # the redis client is only needed here

        return RedisBroker(config, url)
    raise BrokerError(f"broker.url must be tcp://host:port or redis://host:port/0, not {scheme or 'empty'}://…")


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a broker is reached, as a value: calling it opens a client for one thread."""

    config: BrokerConfig
    url: str

    def __call__(self) -> Broker:
        """See connect."""
        return connect(self.config, self.url)

    def plain(self) -> dict[str, Any]:
        """As plain values, for the way to another process of ours."""
        return {"config": self.config.model_dump(), "url": self.url}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Access:
        """The other way."""
        return cls(config=BrokerConfig(**plain["config"]), url=plain["url"])
