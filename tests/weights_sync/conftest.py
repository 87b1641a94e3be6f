"""Real receivers for the publisher's tests: in a thread here, or in a process that can be killed."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from broker.contract import Broker
from broker.local import LocalBroker
from broker.messages import Frontier, Member, MemberState, Publication, Rules
from weights_sync.config import WeightsSyncConfig
from weights_sync.manifest import Manifest
from weights_sync.receiver import Receiver

RULES = Rules(
    max_staleness=1,
    on_stale="mask",
    groups_per_step=4,
    max_attempts=3,
    lease_timeout_s=60.0,
    member_timeout_s=60.0,
)


class Follower:
    """What a generator does about weights, without an engine: follow publications and report what is in use.

    ``take`` answers for one publication: the error, empty when the version is in use.
    """

    def __init__(self, broker: Any, member_id: str, take: Callable[[Publication], str], *, pid: int) -> None:
        self._broker, self._member_id, self._take, self._pid = broker.client(), member_id, take, pid
        self.attempts: list[Publication] = []
        self._stop = threading.Event()
        self._report(MemberState.SYNCING, -1, -1)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Falls silent, as a killed process does."""
        self._stop.set()
        self._thread.join(timeout=10)

    def leave(self) -> None:
        self.stop()
        self._report(MemberState.GONE, -1, -1)

    def _follow(self) -> None:
        known, held = 0, (-1, -1)
        while not self._stop.is_set():
            publication = self._broker.publication(after_attempt=known, wait_s=0.2)
            if publication is None:
                continue
            known = publication.attempt
            if self._member_id in publication.receivers:
                self.attempts.append(publication)
                error = self._take(publication)
                held = held if error else (publication.version, publication.incarnation)
                self._report(MemberState.SERVING, *held, error=error)

    def _report(self, state: MemberState, version: int, incarnation: int, error: str = "") -> None:
        self._broker.report(
            Member(
                member_id=self._member_id,
                role="generator",
                state=state,
                policy_version=version,
                incarnation=incarnation,
                host="127.0.0.1",
                pid=self._pid,
                error=error,
            )
        )


class ThreadReceiver:
    """A Receiver in this process that keeps a copy of every version it got."""

    def __init__(
        self,
        config: WeightsSyncConfig,
        member_id: str,
        check: Callable[[Manifest], None],
        connect: Callable[[], Broker] | None = None,
    ) -> None:
        self._settled: queue.Queue[tuple[int, str]] = queue.Queue()
        self._receiver = Receiver(
            config=config,
            member_id=member_id,
            on_settled=lambda *end: self._settled.put(end),
            check=check,
            connect=connect,
        )
        self.versions: dict[int, dict[str, Tensor]] = {}

    def take(self, publication: Publication) -> str:
        self._receiver.receive(publication)
        attempt, error = self._settled.get(timeout=60)
        if not error:
            staged = self._receiver.take(attempt)
            self.versions[staged.manifest.version] = {name: view.clone() for name, view in staged.staging.views.items()}
        return error


class ProcessReceiver:
    """A Receiver in a process of its own, which kills itself at its ``die_at``-th broadcast or bucket (0: never)."""

    def __init__(self, config: WeightsSyncConfig, member_id: str, die_at: int, broker: Sequence[str] = ()) -> None:
        script = Path(__file__).with_name("receiver_process.py")
        command = [sys.executable, str(script), config.model_dump_json(), member_id, str(die_at), *broker]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def take(self, publication: Publication) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asdict(publication)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            threading.Event().wait()  # a killed process reports nothing; this daemon thread is never heard of again
        return str(json.loads(line)["error"])


@pytest.fixture(params=["collective", "disk", "relay"])
def sync(request: pytest.FixtureRequest, tmp_path: Path) -> WeightsSyncConfig:
    """Settings for each transport, for what does not depend on it."""
    return WeightsSyncConfig(transport=request.param, dir=str(tmp_path), sync_timeout_s=10.0, bucket_bytes=4096)


@pytest.fixture
def run() -> Iterator[LocalBroker]:
    """A broker with an open run at incarnation 0."""
    broker = LocalBroker()
    broker.open_run(rules=RULES, version=0, frontier=Frontier())
    yield broker
    broker.close()


@pytest.fixture
def follow(run: LocalBroker) -> Iterator[Callable[..., tuple[Follower, ThreadReceiver]]]:
    """Starts a follower with a receiver in a thread: follow(member_id, config, check=...)."""
    followers: list[Follower] = []

    def start(
        member_id: str, config: WeightsSyncConfig, check: Callable[[Manifest], None] = lambda manifest: None
    ) -> tuple[Follower, ThreadReceiver]:
        receiver = ThreadReceiver(config, member_id, check, run.client)
        followers.append(Follower(run, member_id, receiver.take, pid=os.getpid()))
        return followers[-1], receiver

    yield start
    for follower in followers:
        follower.leave()


@pytest.fixture
def spawn(run: LocalBroker) -> Iterator[Callable[..., ProcessReceiver]]:
    """Starts a follower with a receiver in a process: spawn(member_id, config, die_at=...)."""
    started: list[ProcessReceiver] = []

    def start(member_id: str, config: WeightsSyncConfig, die_at: int = 0) -> ProcessReceiver:
        receiver = ProcessReceiver(config, member_id, die_at)
        started.append(receiver)
        Follower(run, member_id, receiver.take, pid=receiver.process.pid)
        return receiver

    yield start
    for receiver in started:
        receiver.process.kill()
        receiver.process.wait(timeout=10)
