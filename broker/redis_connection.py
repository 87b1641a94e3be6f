"""The connection to a Redis, ours or somebody's: options, what a user of it needs, and which errors are for good."""

from __future__ import annotations

import os
import re
import ssl
from urllib.parse import parse_qsl, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.address import TLS_FILES
from broker.errors import BrokerError

SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0  # one try; short, so that a person hears soon what is waited for

# Answers of a server that another call may find changed: a failover, somebody's long script, a resharding.
PASSING = re.compile(r"(^|: -?)(BUSY|READONLY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|LOADING)\b")

# What the client sends itself, and what lua/*.lua calls: a user with these and no more can run the ledger.
CLIENT_COMMANDS = ("info", "eval", "evalsha", "hmget", "select", "ping", "subscribe", "unsubscribe")
SCRIPT_COMMANDS = (
    *("time", "publish", "del", "exists", "get", "set"),
    *("hdel", "hexists", "hget", "hgetall", "hincrby", "hkeys", "hlen", "hset", "hstrlen"),
    *("llen", "lrange", "lset", "rpush", "sadd", "scard", "sismember", "smembers", "srem"),
    *("zadd", "zcard", "zpopmin", "zrange", "zrangebyscore", "zrem"),
)


def acl_rule(namespace: str) -> str:
    """The rule of a Redis user that may do what a run needs, on the run's keys and channels alone."""
    commands = " ".join(f"+{name}" for name in (*CLIENT_COMMANDS, *SCRIPT_COMMANDS))
    literally = re.sub(r"([\\*?\[\]])", r"\\\1", namespace)
    return f"resetkeys resetchannels -@all ~{{{literally}}}* &{{{literally}}}:* {commands}"


def open_redis(url: str) -> redis.Redis:
    """A client of the server at ``url``, which it reaches in its first call. Raises BrokerError for a wrong option."""
    for name, value in parse_qsl(urlsplit(url).query):
        if name in TLS_FILES and not os.access(value, os.R_OK):
            raise BrokerError(f"broker.url: {name}={value} cannot be read")
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            **keepalive,
            retry=Retry(NoBackoff(), 0),  # reconnecting is ours, bounded by broker.reconnect_timeout_s
        )
    except ValueError as error:
        raise BrokerError(f"broker.url: {error}") from error


def obstacle(url: str, error: redis.exceptions.RedisError) -> str:
    """Why the server was not reached this time, as far as one can tell."""
    if url.startswith("rediss:"):
        waits = isinstance(error, redis.exceptions.TimeoutError)  # for the end of what it takes for a command
        return f"{error} (does it speak TLS there? if not: redis://)" if waits else str(error)
    hung_up = isinstance(error.__cause__ or error.__context__, ConnectionResetError) or "closed by server" in str(error)
    return f"{error} (does it want TLS there? then: rediss://)" if hung_up else str(error)


def refusal(url: str, error: redis.exceptions.RedisError) -> BrokerError | None:
    """The error in our words if it is one for good; None if the server may be reached later."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = f"the certificate of the Redis at broker.url is not trusted ({cause.verify_message})"
            return BrokerError(f"{text}: name its authority with …?ssl_ca_certs=FILE in broker.url")
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return BrokerError("the Redis at broker.url does not speak TLS there: redis:// instead of rediss://")
        cause = cause.__cause__ or cause.__context__
    wrong_user = isinstance(error, redis.exceptions.AuthenticationError)
    if "NOAUTH" in str(error) or (wrong_user and not urlsplit(url).password):
        return BrokerError("Redis wants a password, and broker.url has none: redis://USER:PASSWORD@HOST:PORT/0")
    if "DB index is out of range" in str(error):
        return BrokerError(
            f"broker.url: Redis has no database {urlsplit(url).path.strip('/')}: leave it out, or take 0"
        )
    if wrong_user:
        return BrokerError(f"Redis refused the user or password of broker.url: {error}")
    if any(words in str(error) for words in ("NOPERM", "permissions", "can't run this command")):
        return BrokerError(f"the user of broker.url may not do that in Redis (docs/broker.md, Security): {error}")
    passing = isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError)
    if passing or PASSING.search(str(error)) or isinstance(error, redis.exceptions.ReadOnlyError):
        return None
    return BrokerError(f"Redis answered with an error: {error}")
