"""The contract's methods as messages: what a client asks, what kind of answer it gets, and who answers.

Each call is one class; ``Call[T]`` declares the answer's type for the type checker and for the codec alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, TypeVar, get_args

from broker.contract import PushOutcome
from broker.ledger import Ledger
from broker.messages import Batch, Frontier, Group, Lease, Member, Prompt, Publication, Rules, RunState
from broker.wellformed import refuse_malformed

T = TypeVar("T")


class Pending(Enum):
    """The answer while a call still has to wait."""

    PENDING = "pending"


PENDING: Literal[Pending.PENDING] = Pending.PENDING


class Call(Generic[T]):
    """A request whose answer is of type T."""


@dataclass(frozen=True, kw_only=True)
class OpenRun(Call[int]):
    """``token`` is new for every call of the method, and the same when that call is sent again."""

    rules: Rules
    version: int
    frontier: Frontier
    token: str


@dataclass(frozen=True, kw_only=True)
class Feed(Call[int]):
    """Broker.feed."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True)
class TakeBatch(Call[Batch | None]):
    """Broker.take_batch."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Trained(Call[None]):
    """Broker.trained."""

    batch_id: str
    version: int


@dataclass(frozen=True, kw_only=True)
class Durable(Call[None]):
    """Broker.durable."""

    version: int


@dataclass(frozen=True, kw_only=True)
class EvalResults(Call[tuple[Group, ...]]):
    """Broker.eval_results."""

    version: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Publish(Call[None]):
    """Broker.publish."""

    publication: Publication


@dataclass(frozen=True, kw_only=True)
class Finish(Call[None]):
    """Broker.finish."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LeasePrompts(Call[tuple[Lease, ...]]):
    """Broker.lease."""

    member_id: str
    policy_version: int
    incarnation: int
    max_prompts: int


@dataclass(frozen=True, kw_only=True)
class Push(Call[PushOutcome]):
    """Broker.push."""

    group: Group


@dataclass(frozen=True, kw_only=True)
class Release(Call[None]):
    """Broker.release."""

    lease_id: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Report(Call[None]):
    """Broker.report."""

    member: Member


@dataclass(frozen=True, kw_only=True)
class ReadPublication(Call[Publication | None]):
    """Broker.publication."""

    after_attempt: int


@dataclass(frozen=True, kw_only=True)
class ReadState(Call[RunState]):
    """Broker.state."""

    after_revision: int


CALLS: dict[str, type[Call[Any]]] = {kind.__name__: kind for kind in Call.__subclasses__()}


def answer_type(kind: type[Call[T]]) -> Any:
    """The declared type of the answer to a kind of call."""
    (bound,) = (base for base in kind.__dict__["__orig_bases__"] if get_args(base))
    return get_args(bound)[0]


def answer(ledger: Ledger, call: Call[Any], *, now: float, last: bool) -> Any:
    """What the ledger says to a call at ``now``; PENDING while it has to wait, unless this is the ``last`` look."""
    ledger.expire(now)
    match call:
        case TakeBatch():
            batch = ledger.take_batch(version=call.version)
            return PENDING if batch is None and not last else batch
        case EvalResults():
            results = ledger.eval_results(version=call.version, count=call.count, last=last)
            return PENDING if results is None else results
        case LeasePrompts():
            leases = _lease(ledger, call, now)
            return PENDING if not leases and not last else leases
        case ReadPublication():
            publication = ledger.publication(after_attempt=call.after_attempt)
            return PENDING if publication is None and not last and not ledger.finished else publication
        case ReadState():
            return PENDING if ledger.revision <= call.after_revision and not last else ledger.state()
        case _:
            return _do(ledger, call, now)


def _lease(ledger: Ledger, call: LeasePrompts, now: float) -> tuple[Lease, ...]:
    return ledger.lease(
        member_id=call.member_id,
        policy_version=call.policy_version,
        incarnation=call.incarnation,
        max_prompts=call.max_prompts,
        now=now,
    )


def _do(ledger: Ledger, call: Call[Any], now: float) -> Any:
    """The calls that never wait."""
    match call:
        case OpenRun():
            return ledger.open_run(rules=call.rules, version=call.version, frontier=call.frontier, token=call.token)
        case Feed():
            return ledger.feed(call.prompts)
        case Trained():
            ledger.trained(batch_id=call.batch_id, version=call.version)
        case Durable():
            ledger.durable(version=call.version)
        case Publish():
            ledger.publish(call.publication)
        case Finish():
            ledger.finish(call.reason)
        case Push():
            refuse_malformed(call.group)
            return ledger.push(call.group)
        case Release():
            ledger.release(lease_id=call.lease_id, error=call.error)
        case Report():
            ledger.report(call.member, now)
        case _:
            raise TypeError(f"no such call: {type(call).__name__}")
    return None
