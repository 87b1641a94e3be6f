"""The broker in Redis (6.2 or newer): the ledger as one Lua script, so that every call is atomic.

Time is the Redis server's own (TIME inside the script): leases and heartbeats are judged by one clock, whatever the
clocks of the clients' machines say. Waiting is looking again: a published notice, the next expiry, or a bounded pause
ends the wait, so that a lost notice costs ``LONGEST_WAIT_S`` and never a hang.
"""

from __future__ import annotations

import functools
import hashlib
import time
import uuid
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar, cast

import msgpack
import redis

from broker.caller import Caller, fresh_token
from broker.calls import Bodies, Call, EvalResults, LeasePrompts, ReadPublication, ReadState, TakeBatch
from broker.config import BrokerConfig
from broker.errors import BrokerError, NoOpenRun, Refused, RunFinished
from broker.redis_calls import READERS, REQUESTS, Request
from broker.redis_connection import SOCKET_TIMEOUT_S, obstacle, open_redis, refusal
from broker.silence import Silence

T = TypeVar("T")

PARTS = ("store", "pool", "items", "wakes", "calls", "blobs", "looks")
LONGEST_WAIT_S = 2.0  # below the socket's timeout, or an idle wait would look like a broken connection
GROUPS_PER_READ = 32
# The channel on which the end of a wait is announced (lua/wakes.lua); leases have one for each client.
WAITS: dict[type[Call[Any]], str] = {
    TakeBatch: "batch",
    EvalResults: "answers",
    ReadPublication: "offers",
    ReadState: "news",
}
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0
OLDEST = (6, 2)


@functools.cache
def script() -> tuple[str, str]:
    """The Lua source and its SHA-1, by which Redis knows it."""
    folder = files("broker") / "lua"
    source = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in PARTS)
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisBroker(Caller):
    """A client for one thread. ``clock`` replaces the server's time, for tests."""

    def __init__(
        self,
        config: BrokerConfig,
        url: str,
        *,
        clock: Callable[[], float] | None = None,
        token: Callable[[], str] = fresh_token,
    ) -> None:
        super().__init__(config, token=token)
        self._clock = clock
        self._namespace = "{" + (config.namespace or "slipstream") + "}"  # one hash slot: scripts touch many keys
        self._checked = False
        self._notices: Any = None
        self._heard: set[str] = set()
        self._lease_channel = f"lease:{uuid.uuid4().hex}"
        self._url = url
        self._redis = open_redis(url)

    def close(self) -> None:
        """See broker.contract.Broker."""
        super().close()
        self._forget_notices()
        self._redis.close()

    # -- calls -------------------------------------------------------------------------------------------------
    def _exchange(self, call: Call[T], bodies: Bodies, wait_s: float) -> tuple[T, Bodies]:
        request = REQUESTS[type(call)](call, bodies)
        channel = self._lease_channel if isinstance(call, LeasePrompts) else WAITS.get(type(call), "")
        until = time.monotonic() + wait_s
        while True:
            left = until - time.monotonic()
            last = left <= 0 or not channel
            status, *rest = self._reached(functools.partial(self._run, call, request, last=last))
            if status != b"wait":
                return cast(tuple[T, Bodies], self._read(call, status, rest))
            if channel not in self._heard:
                # Listen first, then look once more: a change in between is a notice that waits for us.
                self._reached(functools.partial(self._listen, channel))
            else:
                self._await_notice(left, rest[0])

    def _run(self, call: Call[Any], request: Request, *, last: bool) -> list[Any]:
        self._check_server()
        now = "" if self._clock is None else repr(self._clock())
        args = {**request.args, "last": last, "channel": self._lease_channel}
        packed = msgpack.packb(args, unicode_errors="surrogatepass")
        values = (self._namespace, type(call).__name__, now, packed, *request.payloads)
        source, sha = script()
        try:
            return cast(list[Any], self._redis.evalsha(sha, 1, *values))
        except redis.exceptions.NoScriptError:  # first call, or the server was restarted or flushed
            return cast(list[Any], self._redis.eval(source, 1, *values))

    def _read(self, call: Call[Any], status: bytes, rest: list[Any]) -> tuple[Any, Bodies]:
        if status == b"ok":
            value = msgpack.unpackb(rest[0], unicode_errors="surrogatepass", strict_map_key=False)
            read = READERS.get(type(call))
            return (None, ()) if read is None else read(call, value, rest[1:], self._bodies)
        kind = {b"refused": Refused, b"no_open_run": NoOpenRun, b"finished": RunFinished}[status]
        raise kind(rest[0].decode("utf-8", "replace"))

    def _bodies(self, name: str, items: list[str]) -> list[bytes]:
        """The groups stored under these items, read in parts so that no answer gets too large; empty where none is."""
        bodies: list[bytes] = []
        for start in range(0, len(items), GROUPS_PER_READ):
            part = items[start : start + GROUPS_PER_READ]
            found = self._reached(functools.partial(self._redis.hmget, f"{self._namespace}:{name}", part))
            bodies += [body or b"" for body in found]
        return bodies

    # -- the connection ----------------------------------------------------------------------------------------
    def _reached(self, attempt: Callable[[], T]) -> T:
        """Tries until the server answers, with bounded backoff, for at most ``broker.reconnect_timeout_s``."""
        silence, pause = Silence(self._url, self._config.reconnect_timeout_s), FIRST_PAUSE_S
        silence.asked()
        while True:
            try:
                found = attempt()
            except redis.exceptions.RedisError as error:
                if why := refusal(self._url, error):
                    raise why from error
                silence.check(obstacle(self._url, error))
                self._redis.connection_pool.disconnect()  # the address may lead elsewhere by now
                time.sleep(max(0.0, min(pause, silence.left_s())))
                pause = min(2 * pause, LAST_PAUSE_S)
            else:
                silence.ended()
                return found

    def _check_server(self) -> None:
        """Refuses a server that is too old, or that would evict parts of the ledger."""
        if self._checked:
            return
        info = self._redis.info()
        version = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise BrokerError(f"Redis {version} at broker.url is older than {OLDEST[0]}.{OLDEST[1]}")
        policy = info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory", 0) and policy != "noeviction":
            raise BrokerError(
                f"Redis at broker.url may evict the ledger: set its maxmemory-policy to noeviction, not {policy}"
            )
        self._checked = True

    # -- waiting -----------------------------------------------------------------------------------------------
    def _listen(self, channel: str) -> None:
        notices = self._notices or self._redis.pubsub()
        self._notices = notices
        try:
            notices.subscribe(f"{self._namespace}:{channel}")
            notices.get_message(timeout=SOCKET_TIMEOUT_S / 2)  # the confirmation: from here on nothing is missed
        except redis.exceptions.RedisError:
            self._forget_notices()
            raise
        self._heard.add(channel)

    def _await_notice(self, left_s: float, expiry_s: bytes) -> None:
        timeout = min(left_s, LONGEST_WAIT_S, float(expiry_s) if expiry_s else LONGEST_WAIT_S)
        try:
            self._notices.get_message(timeout=max(timeout, 0.001))
            while self._notices.get_message(timeout=0.0) is not None:
                pass
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            self._forget_notices()  # the next look finds out whether the server is there at all

    def _forget_notices(self) -> None:
        if self._notices is not None:
            self._notices.close()
            self._notices = None
            self._heard.clear()
