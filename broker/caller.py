"""The contract's methods in terms of calls, for every client: a backend only says how a call is answered."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from broker import calls
from broker.calls import Call
from broker.contract import PushOutcome
from broker.errors import BrokerClosed
from broker.messages import Batch, Frontier, Group, Lease, Member, Prompt, Publication, Rules, RunState
from broker.reasons import short
from broker.wellformed import refuse_malformed

T = TypeVar("T")
PROMPTS_PER_CALL = 256  # keeps a frame and the time the ledger is busy small, however much is fed at once


def fresh_token() -> str:
    """A name that no other call has."""
    return uuid.uuid4().hex


class Caller(ABC):
    """broker.contract.Broker over one operation: ``_call``."""

    def __init__(self, *, token: Callable[[], str] = fresh_token) -> None:
        self._token = token
        self._closed = False

    @abstractmethod
    def _answer(self, call: Call[T], wait_s: float) -> T:
        """The answer to a call, waiting up to ``wait_s`` where the call can wait."""

    def _call(self, call: Call[T], wait_s: float = 0.0) -> T:
        if self._closed:
            raise BrokerClosed("this client of the broker is closed")
        return self._answer(call, wait_s)

    def open_run(self, *, rules: Rules, version: int, frontier: Frontier) -> int:
        """See broker.contract.Broker. Every call is a new incarnation; one sent again by the client is not."""
        return self._call(calls.OpenRun(rules=rules, version=version, frontier=frontier, token=self._token()))

    def feed(self, prompts: Sequence[Prompt]) -> int:
        """See broker.contract.Broker."""
        parts = [tuple(prompts[i : i + PROMPTS_PER_CALL]) for i in range(0, len(prompts), PROMPTS_PER_CALL)]
        return sum(self._call(calls.Feed(prompts=part)) for part in parts)

    def take_batch(self, *, version: int, wait_s: float) -> Batch | None:
        """See broker.contract.Broker."""
        return self._call(calls.TakeBatch(version=version), wait_s)

    def trained(self, *, batch_id: str, version: int) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Trained(batch_id=batch_id, version=version))

    def durable(self, *, version: int) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Durable(version=version))

    def eval_results(self, *, version: int, count: int, wait_s: float) -> tuple[Group, ...]:
        """See broker.contract.Broker."""
        return self._call(calls.EvalResults(version=version, count=count), wait_s)

    def publish(self, publication: Publication) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Publish(publication=publication))

    def finish(self, reason: str) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Finish(reason=reason))

    def lease(
        self, *, member_id: str, policy_version: int, incarnation: int, max_prompts: int, wait_s: float
    ) -> tuple[Lease, ...]:
        """See broker.contract.Broker."""
        call = calls.LeasePrompts(
            member_id=member_id,
            policy_version=policy_version,
            incarnation=incarnation,
            max_prompts=max_prompts,
        )
        return self._call(call, wait_s)

    def push(self, group: Group) -> PushOutcome:
        """See broker.contract.Broker. Raises Refused for a group whose parts have not grown together."""
        refuse_malformed(group)
        return self._call(calls.Push(group=group))

    def release(self, *, lease_id: str, error: str) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Release(lease_id=lease_id, error=short(error)))

    def report(self, member: Member) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Report(member=member))

    def publication(self, *, after_attempt: int, wait_s: float) -> Publication | None:
        """See broker.contract.Broker."""
        return self._call(calls.ReadPublication(after_attempt=after_attempt), wait_s)

    def state(self, *, after_revision: int = -1, wait_s: float = 0.0) -> RunState:
        """See broker.contract.Broker."""
        return self._call(calls.ReadState(after_revision=after_revision), wait_s)

    def close(self) -> None:
        """See broker.contract.Broker."""
        self._closed = True
