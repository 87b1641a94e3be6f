"""What each call hands to the Lua script, and how the script's answer becomes the call's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from broker import calls
from broker.codec import decode, encode
from broker.contract import PushOutcome
from broker.messages import (
    Batch,
    Counts,
    EndedItem,
    Group,
    Lease,
    Member,
    MemberState,
    Prompt,
    Publication,
    Rules,
    RunState,
    Split,
)
from broker.reasons import short
from broker.wellformed import payload_bytes, refuse_misnamed, round_version


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments the script reads, and payloads it only stores."""

    args: dict[str, Any]
    payloads: list[bytes] = field(default_factory=list)


ReadGroups = Callable[[str, list[str]], tuple[Group, ...]]
_STORED = 1 << 40  # what Redis itself has taken in is not limited again


def _open_run(call: calls.OpenRun) -> Request:
    rules = {name: str(value) for name, value in asdict(call.rules).items()}
    frontier = call.frontier
    args = {"rules": rules, "version": call.version, "base": frontier.base, "beyond": list(frontier.beyond)}
    return Request({**args, "token": call.token}, [encode(call.rules)])


def _feed(call: calls.Feed) -> Request:
    refuse_misnamed(call.prompts)
    evaluation = [prompt for prompt in call.prompts if prompt.split is Split.EVAL]
    args: dict[str, Any] = {
        "items": [prompt.item for prompt in call.prompts],
        "evaluation": [prompt.split is Split.EVAL for prompt in call.prompts],
    }
    if evaluation:
        args["round"] = round_version(evaluation)
    return Request(args, [encode(prompt) for prompt in call.prompts])


def _push(call: calls.Push) -> Request:
    group = call.group
    args = {
        "item": group.prompt.item,
        "lease_id": group.lease_id,
        "incarnation": group.incarnation,
        "evaluation": group.prompt.split is Split.EVAL,
        "tokens": [list(pair) for pair in group.tokens_per_version().items()],
        "size": payload_bytes(group),
    }
    return Request(args, [encode(group)])


def _report(call: calls.Report) -> Request:
    member = call.member
    shown = {
        "state": member.state.value,
        "version": member.policy_version,
        "incarnation": member.incarnation,
        "error": member.error,
    }
    args = {
        "member_id": member.member_id,
        "shown": shown,
        "error": short(member.error),
        "leases": list(member.leases),
    }
    return Request(args, [encode(member)])


def _publish(call: calls.Publish) -> Request:
    publication = call.publication
    args = {"incarnation": publication.incarnation, "attempt": publication.attempt}
    return Request(args, [encode(publication)])


def _plain(call: Any) -> Request:
    return Request(asdict(call))


REQUESTS: dict[type[calls.Call[Any]], Callable[[Any], Request]] = {
    **dict.fromkeys(calls.CALLS.values(), _plain),
    calls.OpenRun: _open_run,
    calls.Feed: _feed,
    calls.Push: _push,
    calls.Report: _report,
    calls.Publish: _publish,
}


def _take_batch(call: calls.TakeBatch, value: Any, blobs: list[bytes], groups: ReadGroups) -> Batch | None:
    if not value:
        return None
    ended = [
        EndedItem(item=item, position=int(item), state="dead", reason=reason) for item, reason in list(value["ended"])
    ]
    return Batch(
        batch_id=value["id"],
        version=call.version,
        incarnation=int(value["id"].partition(".")[0]),
        groups=groups("groups", list(value["items"])),
        ended=tuple(ended),
    )


def _eval_results(call: calls.EvalResults, value: Any, blobs: list[bytes], groups: ReadGroups) -> tuple[Group, ...]:
    answered = groups("eval:answers", list(value))
    return tuple(sorted(answered, key=lambda group: group.prompt.position))


def _leases(call: calls.LeasePrompts, value: Any, blobs: list[bytes], groups: ReadGroups) -> tuple[Lease, ...]:
    prompts = [decode(blob, Prompt, max_bytes=_STORED) for blob in blobs]
    return tuple(
        Lease(lease_id=lease_id, prompt=prompt, attempt=attempt, incarnation=call.incarnation)
        for (lease_id, attempt, _), prompt in zip(list(value), prompts, strict=True)
    )


def _state(call: calls.ReadState, value: Any, blobs: list[bytes], groups: ReadGroups) -> RunState:
    rules, publication, *members = blobs
    books = ("fed", "queued", "leased", "buffered", "training", "trained", "durable")
    counts = Counts(
        **{name: value[name] for name in books},
        filtered={},
        dead=dict(sorted((reason, count) for reason, count in list(value["dead"]))),
        events=dict(sorted((name, count) for name, count in list(value["events"]))),
    )
    roster = [_member(blob, shown) for blob, (_, shown) in zip(members, list(value["shown"]), strict=True)]
    return RunState(
        revision=value["revision"],
        incarnation=value["incarnation"],
        version=value["version"],
        finished=value["finished"],
        rules=decode(rules, Rules, max_bytes=_STORED) if rules else None,
        counts=counts,
        members=tuple(sorted(roster, key=lambda member: member.member_id)),
        publication=decode(publication, Publication, max_bytes=_STORED) if publication else None,
        buffered_bytes=value["buffered_bytes"],
    )


def _member(blob: bytes, shown: dict[str, Any]) -> Member:
    member = decode(blob, Member, max_bytes=_STORED)
    if shown["state"] == MemberState.GONE.value:
        return replace(member, state=MemberState.GONE, error=shown["error"], leases=())
    return member


def _number(call: Any, value: Any, blobs: list[bytes], groups: ReadGroups) -> int:
    return int(value)


def _outcome(call: calls.Push, value: Any, blobs: list[bytes], groups: ReadGroups) -> PushOutcome:
    return PushOutcome(value)


def _publication(call: calls.ReadPublication, value: Any, blobs: list[bytes], groups: ReadGroups) -> Publication | None:
    return decode(blobs[0], Publication, max_bytes=_STORED) if value else None


READERS: dict[type[calls.Call[Any]], Callable[[Any, Any, list[bytes], ReadGroups], Any]] = {
    calls.OpenRun: _number,
    calls.Feed: _number,
    calls.TakeBatch: _take_batch,
    calls.EvalResults: _eval_results,
    calls.LeasePrompts: _leases,
    calls.Push: _outcome,
    calls.ReadPublication: _publication,
    calls.ReadState: _state,
}
