"""The contract's methods as messages: what a client asks, what kind of answer it gets, and who answers.

Each call is one class; ``Call[T]`` declares the answer's type for the type checker and for the codec alike. Prompts
and groups travel beside calls and answers as bodies, in the order that the call or the answer names them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, TypeVar, get_args

from broker.contract import PushOutcome
from broker.heads import BatchHead, GroupHead, LeaseHead
from broker.ledger import Ledger
from broker.messages import DeadItem, Frontier, Member, Publication, Rules, RunState

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
    after: int
    unsaved: int
    token: str


@dataclass(frozen=True, kw_only=True)
class Feed(Call[int]):
    """Broker.feed. Bodies: the prompts."""

    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TakeBatch(Call[BatchHead | None]):
    """Broker.take_batch. Bodies of the answer: the groups."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Spoiled(Call[None]):
    """The group under this lease, in the batch for ``version``, cannot be read."""

    version: int
    lease_id: str
    error: str


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
class EvalResults(Call[None]):
    """Broker.eval_results. Bodies of the answer: the groups."""

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
class LeasePrompts(Call[tuple[LeaseHead, ...]]):
    """Broker.lease. ``token`` as in OpenRun. Bodies of the answer: the prompts."""

    member_id: str
    policy_version: int
    incarnation: int
    max_prompts: int
    token: str


@dataclass(frozen=True, kw_only=True)
class Push(Call[tuple[PushOutcome | None, ...]]):
    """Broker.push_all. Bodies: the groups. None for one: there is no room for it now."""

    heads: tuple[GroupHead, ...]


@dataclass(frozen=True, kw_only=True)
class WorthPushing(Call[bool]):
    """Whether to send groups again that had no room.

    True where the smallest of them, of ``size`` bytes, has room now, or one of their leases no longer holds, so that
    its push is settled at once. The run may have finished.
    """

    size: int
    lease_ids: tuple[str, ...]


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


@dataclass(frozen=True, kw_only=True)
class ReadDead(Call[tuple[DeadItem, ...]]):
    """Broker.dead_items."""


@dataclass(frozen=True, kw_only=True)
class Requeue(Call[int]):
    """Broker.requeue."""

    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PutBlob(Call[None]):
    """Broker.put_blob. Body: the data."""

    name: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class GetBlob(Call[bool]):
    """Broker.get_blob: whether there is one. Body of the answer: its data."""

    name: str


@dataclass(frozen=True, kw_only=True)
class SweepBlobs(Call[int]):
    """Broker.sweep_blobs."""

    keep: tuple[str, ...]


CALLS: dict[str, type[Call[Any]]] = {kind.__name__: kind for kind in Call.__subclasses__()}


def answer_type(kind: type[Call[T]]) -> Any:
    """The declared type of the answer to a kind of call."""
    (bound,) = (base for base in kind.__dict__["__orig_bases__"] if get_args(base))
    return get_args(bound)[0]


Bodies = Sequence[bytes]


def answer(
    ledger: Ledger, call: Call[Any], bodies: Bodies, *, now: float, last: bool
) -> tuple[Any, Bodies] | Literal[Pending.PENDING]:
    """What the ledger says to a call at ``now``, with the bodies that belong to it.

    PENDING while it has to wait, unless this is the ``last`` look.
    """
    ledger.expire(now)
    match call:
        case TakeBatch():
            batch = ledger.take_batch(version=call.version)
            if batch is None:
                return (None, ()) if last else PENDING
            return batch, ledger.bodies(batch)
        case EvalResults():
            results = ledger.eval_results(version=call.version, count=call.count, last=last)
            return PENDING if results is None else (None, results)
        case LeasePrompts():
            leases = _lease(ledger, call, now)
            return (leases, [ledger.prompt(lease) for lease in leases]) if leases or last else PENDING
        case ReadPublication():
            publication = ledger.publication(after_attempt=call.after_attempt)
            return PENDING if publication is None and not last and not ledger.finished else (publication, ())
        case GetBlob():
            data = ledger.blobs.get(call.name)
            return data is not None, () if data is None else (data,)
        case ReadState():
            return PENDING if ledger.revision <= call.after_revision and not last else (ledger.state(now), ())
        case _:
            return _do(ledger, call, bodies, now), ()


def waits_alike(call: Call[Any]) -> object:
    """Calls with the same answer to this have the same chances: where one has to wait, so has the next."""
    match call:
        case LeasePrompts():
            return LeasePrompts, call.policy_version, call.incarnation
        case _:
            return call


def _lease(ledger: Ledger, call: LeasePrompts, now: float) -> tuple[LeaseHead, ...]:
    return ledger.lease(
        member_id=call.member_id,
        policy_version=call.policy_version,
        incarnation=call.incarnation,
        max_prompts=call.max_prompts,
        now=now,
        token=call.token,
    )


def _do(ledger: Ledger, call: Call[Any], bodies: Bodies, now: float) -> Any:
    """The calls that never wait."""
    match call:
        case OpenRun():
            return ledger.open_run(
                rules=call.rules,
                version=call.version,
                frontier=call.frontier,
                after=call.after,
                unsaved=call.unsaved,
                token=call.token,
            )
        case Feed():
            return ledger.feed(call.items, bodies)
        case Push():
            return ledger.push(call.heads, bodies)
        case WorthPushing():
            return ledger.worth_pushing(size=call.size, lease_ids=call.lease_ids)
        case Spoiled():
            ledger.spoiled(version=call.version, lease_id=call.lease_id, error=call.error)
        case Trained():
            ledger.trained(batch_id=call.batch_id, version=call.version)
        case Durable():
            ledger.durable(version=call.version)
        case Publish():
            ledger.publish(call.publication)
        case Finish():
            ledger.finish(call.reason)
        case Release():
            ledger.release(lease_id=call.lease_id, error=call.error)
        case Report():
            ledger.report(call.member, now)
        case ReadDead():
            return ledger.dead_items()
        case Requeue():
            return ledger.requeue(call.items)
        case PutBlob():
            ledger.blobs.put(call.name, bodies[0], max_bytes=call.max_bytes)
        case SweepBlobs():
            return ledger.blobs.sweep(call.keep)
        case _:
            raise TypeError(f"no such call: {type(call).__name__}")
    return None
