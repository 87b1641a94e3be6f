"""What a broker shows of a member: its own word, unless its silence or its version say otherwise.

    starting ─► syncing ─► serving ─► draining ─► gone      as the member reports itself
                             │
                             ├─ stale      reported serving, but nothing to train on can be leased under its version
    any but gone ────────────┴─ suspect    no heartbeat for half of member_timeout_s; after all of it: gone

Derived at every look and kept nowhere: what makes a member stale or suspect is the run's going on, not a report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from broker.messages import Member, MemberState, Rules
from broker.rules import trainable


@dataclass(frozen=True, kw_only=True)
class Course:
    """Where the run is. ``batches_out``: put together and not trained yet."""

    rules: Rules | None
    incarnation: int
    version: int
    batches_out: int


def shown(member: Member, *, silent_s: float, course: Course) -> Member:
    """The member in the state that people and the publisher are to see. ``silent_s``: since its last report."""
    if course.rules is None or member.state is MemberState.GONE:
        return member
    if silent_s >= course.rules.member_timeout_s / 2:
        return replace(member, state=MemberState.SUSPECT)
    leases = member.incarnation == course.incarnation and trainable(
        policy_version=member.policy_version,
        version=course.version,
        batches_out=course.batches_out,
        max_staleness=course.rules.max_staleness,
    )
    if member.role == "generator" and member.state is MemberState.SERVING and not leases:
        return replace(member, state=MemberState.STALE)
    return member
