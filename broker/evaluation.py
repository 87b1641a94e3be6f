"""The evaluation round: prompts of one policy version, answered once, forgotten with the next round."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import PushOutcome
from broker.errors import Refused
from broker.messages import Group, Prompt
from broker.pool import Pool
from broker.wellformed import round_version


class EvaluationRound:
    """One version's prompts and answers. Its leases need that very version, so that a pass has one policy."""

    def __init__(self) -> None:
        self.version = -1
        self.pool = Pool()
        self.answers: dict[str, Group] = {}

    def feed(self, prompts: Sequence[Prompt]) -> int:
        """Queues the unknown ones; prompts of another version start the round anew."""
        if not prompts:
            return 0
        version = round_version(prompts)
        if version != self.version:
            self.version, self.pool, self.answers = version, Pool(), {}
        added = 0
        for prompt in prompts:
            if prompt.item not in self.pool.items and prompt.item not in self.answers:
                self.pool.add(prompt)
                added += 1
        return added

    def wants(self, policy_version: int) -> bool:
        """Whether a generator that holds this version has a prompt to answer here."""
        return policy_version == self.version and bool(self.pool.queued)

    def push(self, group: Group) -> PushOutcome:
        """Keeps the first answer under a lease that still holds."""
        grant = self.pool.grants.get(group.lease_id)
        if grant is None:
            return PushOutcome.DUPLICATE
        if grant.item != group.prompt.item:
            raise Refused(f"lease {group.lease_id} is for item {grant.item}, not for {group.prompt.item}")
        del self.pool.grants[group.lease_id]
        self.pool.forget(grant.item)
        self.answers[grant.item] = group
        return PushOutcome.ACCEPTED

    def results(self, version: int) -> tuple[Group, ...]:
        """The answers by position; empty for any round but the present one."""
        ordered = sorted(self.answers.values(), key=lambda group: (group.prompt.position, group.prompt.item))
        return tuple(ordered) if version == self.version else ()
