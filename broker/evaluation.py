"""The evaluation round: prompts of one policy version, answered once, forgotten with the next round."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import PushOutcome
from broker.heads import GroupHead, position_of, round_version
from broker.pool import Pool
from broker.rows import Rows


class EvaluationRound:
    """One version's prompts and answers. Its leases need that very version, so that a pass has one policy."""

    def __init__(self) -> None:
        self.version = -1
        self.pool = Pool()
        self.answers: Rows[str, bytes] = Rows()

    def start(self, version: int) -> None:
        """A round without prompts; the one before is forgotten."""
        self.version = version
        self.pool.forget_all()
        self.answers.remove_all()

    def feed(self, prompts: Sequence[tuple[str, bytes]]) -> int:
        """Queues the unknown ones; prompts of another version start the round anew."""
        if not prompts:
            return 0
        version = round_version(item for item, _ in prompts)
        if version != self.version:
            self.start(version)
        added = 0
        for item, prompt in prompts:
            if item not in self.pool.items and item not in self.answers:
                self.pool.add(item, prompt)
                added += 1
        return added

    def wants(self, policy_version: int) -> bool:
        """Whether a generator that holds this version has a prompt to answer here."""
        return policy_version == self.version and bool(self.pool.queued)

    def push(self, head: GroupHead, body: bytes) -> PushOutcome:
        """Keeps the first answer under a lease that still holds."""
        grant = self.pool.grants.get(head.lease_id)
        if grant is None:
            return PushOutcome.DUPLICATE
        self.pool.end(head.lease_id)
        self.pool.forget(grant.item)
        self.answers[grant.item] = body
        return PushOutcome.ACCEPTED

    def results(self, version: int) -> tuple[bytes, ...]:
        """The answers by position; empty for any round but the present one."""
        ordered = sorted(self.answers, key=position_of)
        return tuple(self.answers[item] for item in ordered) if version == self.version else ()
