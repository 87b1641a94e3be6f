"""Who takes part: the members as they last reported, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile

from broker.errors import Refused
from broker.messages import Member, MemberState
from broker.standing import Course, shown

LIVES_KEPT = 4  # of one id
GONE_KEPT = 32  # departures with an error that stay visible, so that their error can be told


@dataclass(slots=True)
class Roster:
    """Members by id. One that left cleanly is forgotten; one that failed or fell silent is kept as GONE."""

    members: dict[str, Member] = field(default_factory=dict)
    _replaced: dict[str, tuple[str, ...]] = field(default_factory=dict)  # lives that a newer one has taken the id of
    _seen: dict[str, float] = field(default_factory=dict)  # in order of time: who reports goes to the end

    def report(self, member: Member, now: float) -> bool:
        """Takes a report in and returns whether it is news beyond a heartbeat.

        Raises Refused for a process whose id a newer one has taken.
        """
        before = self.members.get(member.member_id)
        if before is not None and before.life != member.life:
            self._replace_life(member, before)
        self.members.pop(member.member_id, None)
        self._seen.pop(member.member_id, None)
        if member.state is not MemberState.GONE:
            self.members[member.member_id] = member
            self._seen[member.member_id] = now
        elif member.error:
            self._keep_gone(member)
        else:
            self._replaced.pop(member.member_id, None)
        return before is not None if member.state is MemberState.GONE and not member.error else _news(before, member)

    def expire(self, now: float, timeout_s: float) -> list[Member]:
        """Marks members without a heartbeat for ``timeout_s`` as GONE and returns them."""
        silent = takewhile(lambda one: self._seen[one] + timeout_s <= now, self._seen)
        lost = [self.members.pop(one) for one in sorted(silent)]
        for member in lost:
            del self._seen[member.member_id]
            text = member.error or f"no heartbeat for broker.member_timeout_s = {timeout_s:g}"
            self._keep_gone(replace(member, state=MemberState.GONE, error=text))
        return lost

    def next_end(self, timeout_s: float) -> float | None:
        """When the first member will have been silent for too long."""
        return next(iter(self._seen.values())) + timeout_s if self._seen else None

    def all(self, now: float, course: Course) -> tuple[Member, ...]:
        """Everyone as shown, by id."""
        return tuple(
            shown(self.members[one], silent_s=now - self._seen.get(one, now), course=course)
            for one in sorted(self.members)
        )

    def _replace_life(self, member: Member, before: Member) -> None:
        replaced = self._replaced.get(member.member_id, ())
        if member.life in replaced:
            raise Refused(
                f"another process has joined as {member.member_id} since: give every generator an --id of its own"
            )
        self._replaced[member.member_id] = (*replaced[1 - LIVES_KEPT :], before.life)

    def _keep_gone(self, member: Member) -> None:
        self.members[member.member_id] = replace(member, leases=())
        gone = [one for one, kept in self.members.items() if kept.state is MemberState.GONE]
        for one in gone[:-GONE_KEPT]:
            del self.members[one]
            self._replaced.pop(one, None)


def _news(before: Member | None, after: Member) -> bool:
    def told(member: Member) -> tuple[object, ...]:
        return member.state, member.policy_version, member.incarnation, member.error

    return before is None or told(before) != told(after)
