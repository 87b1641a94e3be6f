"""What each call hands to the Lua script, and how the script's answer becomes the call's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgpack

from broker import calls
from broker.calls import Bodies
from broker.codec import decode, encode
from broker.contract import PushOutcome
from broker.heads import BatchHead, LeaseHead, is_eval, position_of, refuse_misfit, refuse_misnamed_items, round_version
from broker.messages import Counts, DeadItem, EndedItem, Member, MemberState, Publication, Rules, RunState
from broker.reasons import printable, short
from broker.standing import Course, shown
from broker.wellformed import refuse_senseless


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments the script reads, and payloads it only stores."""

    args: dict[str, Any]
    payloads: Bodies = ()


ReadBodies = Callable[[str, list[str]], list[bytes]]
Answer = tuple[Any, Bodies]
_STORED = 1 << 40  # what Redis itself has taken in is not limited again


def _open_run(call: calls.OpenRun, bodies: Bodies) -> Request:
    refuse_senseless(rules=call.rules, version=call.version, frontier=call.frontier, after=call.after, token=call.token)
    rules = {name: str(value) for name, value in asdict(call.rules).items()}
    frontier = call.frontier
    args = {"rules": rules, "version": call.version, "base": frontier.base, "beyond": list(frontier.beyond)}
    return Request({**args, "after": call.after, "unsaved": call.unsaved, "token": call.token}, [encode(call.rules)])


def _feed(call: calls.Feed, bodies: Bodies) -> Request:
    refuse_misnamed_items(call.items)
    args: dict[str, Any] = {"items": list(call.items)}
    evaluation = [item for item in call.items if is_eval(item)]
    if evaluation:
        args["round"] = round_version(evaluation)
    return Request(args, bodies)


def _push(call: calls.Push, bodies: Bodies) -> Request:
    for head in call.heads:
        refuse_misfit(head)
    return Request({"heads": [vars(head) for head in call.heads]}, bodies)


def _report(call: calls.Report, bodies: Bodies) -> Request:
    member = call.member
    told = {
        "state": member.state.value,
        "version": member.policy_version,
        "incarnation": member.incarnation,
        "error": printable(member.error),
        "life": member.life,
    }
    args = {
        "member_id": member.member_id,
        "shown": told,
        "error": short(member.error),
        "leases": list(member.leases),
    }
    return Request(args, [encode(replace(member, error=printable(member.error)))])


def _publish(call: calls.Publish, bodies: Bodies) -> Request:
    publication = call.publication
    args = {"incarnation": publication.incarnation, "attempt": publication.attempt}
    return Request(args, [encode(publication)])


def _put_blob(call: calls.PutBlob, bodies: Bodies) -> Request:
    return Request(asdict(call), bodies)


def _plain(call: Any, bodies: Bodies) -> Request:
    return Request(asdict(call))


REQUESTS: dict[type[calls.Call[Any]], Callable[[Any, Bodies], Request]] = {
    **dict.fromkeys(calls.CALLS.values(), _plain),
    calls.OpenRun: _open_run,
    calls.Feed: _feed,
    calls.Push: _push,
    calls.Report: _report,
    calls.Publish: _publish,
    calls.PutBlob: _put_blob,
}


def _take_batch(call: calls.TakeBatch, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    if not value:
        return None, ()
    ended = [
        EndedItem(item=item, position=position_of(item), state="dead", reason=reason)
        for item, reason in list(value["ended"])
    ]
    items = list(value["items"])
    head = BatchHead(
        batch_id=value["id"],
        version=call.version,
        incarnation=int(value["id"].partition(".")[0]),
        items=tuple(items),
        lease_ids=tuple(value["lease_ids"]),
        ended=tuple(ended),
    )
    return head, read("groups", items)


def _eval_results(call: calls.EvalResults, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    return None, read("eval:answers", sorted(value, key=position_of))


def _leases(call: calls.LeasePrompts, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    leases = [LeaseHead(lease_id=one, item=item, attempt=attempt) for one, attempt, item in list(value)]
    return tuple(leases), bodies


def _dead(call: calls.ReadDead, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    dead = [
        DeadItem(item=item, position=position_of(item), attempts=attempts, error=error)
        for item, attempts, error in list(value)
    ]
    return tuple(sorted(dead, key=lambda one: one.position)), ()


def _state(call: calls.ReadState, value: Any, blobs: list[bytes], read: ReadBodies) -> Answer:
    rules, publication, packed = blobs
    members = msgpack.unpackb(packed, raw=True)
    books = ("fed", "queued", "leased", "buffered", "training", "trained", "durable")
    counts = Counts(
        **{name: value[name] for name in books},
        filtered={},
        dead=dict(sorted((reason, count) for reason, count in list(value["dead"]))),
        events=dict(sorted((name, count) for name, count in list(value["events"]))),
    )
    silent_s = dict(value["silent_s"] or {})
    ruling = decode(rules, Rules, max_bytes=_STORED) if rules else None
    course = Course(
        rules=ruling, incarnation=value["incarnation"], version=value["version"], batches_out=value["batches"]
    )
    roster = [
        shown(_member(blob, told), silent_s=silent_s.get(member_id, 0.0), course=course)
        for blob, (member_id, told) in zip(members, list(value["shown"]), strict=True)
    ]
    state = RunState(
        revision=value["revision"],
        incarnation=value["incarnation"],
        version=value["version"],
        finished=value["finished"],
        rules=ruling,
        counts=counts,
        members=tuple(sorted(roster, key=lambda member: member.member_id)),
        publication=decode(publication, Publication, max_bytes=_STORED) if publication else None,
        buffered_bytes=value["buffered_bytes"],
    )
    return state, ()


def _member(blob: bytes, told: dict[str, Any]) -> Member:
    member = decode(blob, Member, max_bytes=_STORED)
    if told["state"] == MemberState.GONE.value:
        return replace(member, state=MemberState.GONE, error=told["error"], leases=())
    return member


def _truth(call: Any, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    return bool(value), ()


def _number(call: Any, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    return int(value), ()


def _outcomes(call: calls.Push, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    return tuple(PushOutcome(one) if one else None for one in value), ()


def _publication(call: calls.ReadPublication, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    return decode(bodies[0], Publication, max_bytes=_STORED) if value else None, ()


def _blob(call: calls.GetBlob, value: Any, bodies: list[bytes], read: ReadBodies) -> Answer:
    return value, bodies


READERS: dict[type[calls.Call[Any]], Callable[[Any, Any, list[bytes], ReadBodies], Answer]] = {
    calls.OpenRun: _number,
    calls.Feed: _number,
    calls.TakeBatch: _take_batch,
    calls.EvalResults: _eval_results,
    calls.LeasePrompts: _leases,
    calls.Push: _outcomes,
    calls.WorthPushing: _truth,
    calls.ReadPublication: _publication,
    calls.ReadState: _state,
    calls.ReadDead: _dead,
    calls.Requeue: _number,
    calls.GetBlob: _blob,
    calls.SweepBlobs: _number,
}
