"""The training items and the states they are in: every transition of the ledger that moves one.

``pool`` holds the prompts (queued, leased), ``buffer`` the delivered groups, ``batches`` those being trained,
``trained_at`` the version each trained item went into, ``ended`` what will not be trained, ``frontier`` the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from broker import rules as staleness
from broker.messages import Batch, EndedItem, Frontier, Group, Prompt, Rules
from broker.pool import Item, Pool
from broker.reasons import tally


@dataclass(frozen=True, slots=True)
class Held:
    """A delivered group. ``incarnation`` is the oldest one it may have tokens of; ``size`` in bytes."""

    group: Group
    tokens_per_version: dict[int, int]
    incarnation: int
    arrival: int
    size: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An item that ended untrained; ``version`` is the policy version whose batch tells the learner of it."""

    note: EndedItem
    version: int | None = None


class TrainingItems:
    """Containers and transitions. An item is in exactly one container, which ``counts`` relies on."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.buffer: dict[str, Held] = {}
        self.batches: dict[int, tuple[Batch, dict[str, Held]]] = {}
        self.trained_at: dict[str, int] = {}
        self.ended: dict[str, Ended] = {}
        self.frontier = Frontier()
        self.fed = 0
        self.durable = 0
        self.dead: dict[str, int] = {}
        self.events: Counter[str] = Counter()
        self._beyond: frozenset[int] = frozenset()
        self._durable_version = -1
        self._forks: list[int] = []  # _forks[i]: the version that incarnation i started from

    # -- looking -----------------------------------------------------------------------------------------------
    def in_batches(self) -> int:
        """Groups in batches out."""
        return sum(len(held) for _, held in self.batches.values())

    def outstanding(self) -> int:
        """Groups leased, buffered or in batches: what the window bounds."""
        return len(self.pool.grants) + len(self.buffer) + self.in_batches()

    def payload_bytes(self) -> int:
        """Bytes of all groups held."""
        held = [*self.buffer.values(), *(one for _, batch in self.batches.values() for one in batch.values())]
        return sum(one.size for one in held)

    def abandoned(self, versions: Iterable[int], incarnation: int) -> bool:
        """Whether a later incarnation has started from before one of these versions."""
        later = min(self._forks[max(0, incarnation + 1) :], default=None)
        return later is not None and any(version > later for version in versions)

    # -- forward -----------------------------------------------------------------------------------------------
    def feed(self, prompt: Prompt) -> bool:
        """Queues an item unless it is known."""
        item = prompt.item
        if self._is_durable(prompt.position) or item in self.pool.items or item in self.ended:
            return False
        self.pool.add(prompt)
        self.fed += 1
        return True

    def hold(self, item: str, held: Held) -> None:
        """Puts a delivered group into the buffer."""
        self.buffer[item] = held

    def end(self, item: Item) -> None:
        """Counts an item out whose last attempt has failed; the next batch tells the learner."""
        reason = tally(self.dead, item.error)
        note = EndedItem(item=item.prompt.item, position=item.prompt.position, state="dead", reason=reason)
        self.ended[note.item] = Ended(note)

    def return_stale(self, version: int, rules: Rules) -> int:
        """Queues the prompts of groups that have nothing to give at ``version``; returns how many."""
        stale = [
            item
            for item, held in self.buffer.items()
            if staleness.is_stale(
                held.tokens_per_version,
                version=version,
                max_staleness=rules.max_staleness,
                on_stale=rules.on_stale,
            )
        ]
        for item in stale:
            del self.buffer[item]
            self.pool.queue(item)
        self.events["dropped" if rules.on_stale == "drop" else "stale"] += len(stale)
        return len(stale)

    def assemble(self, *, batch_id: str, version: int, incarnation: int, rules: Rules) -> Batch:
        """Moves the groups that lose most at ``version + 1`` into a batch."""

        def urgency(entry: tuple[str, Held]) -> tuple[int, int]:
            tokens = entry[1].tokens_per_version
            lost = staleness.tokens_lost_next(tokens, version=version, max_staleness=rules.max_staleness)
            return -lost, entry[1].arrival

        chosen = dict(sorted(self.buffer.items(), key=urgency)[: rules.groups_per_step])
        for item in chosen:
            del self.buffer[item]
        untold = sorted((one for one in self.ended.values() if one.version is None), key=lambda o: o.note.position)
        for one in untold:
            self.ended[one.note.item] = replace(one, version=version + 1)
        batch = Batch(
            batch_id=batch_id,
            version=version,
            incarnation=incarnation,
            groups=tuple(held.group for held in chosen.values()),
            ended=tuple(one.note for one in untold),
        )
        self.batches[version] = (batch, chosen)
        return batch

    def train(self, version: int) -> None:
        """The batch for ``version - 1`` has become part of ``version``; its groups are not needed any more."""
        _, held = self.batches.pop(version - 1)
        self.trained_at.update(dict.fromkeys(held, version))

    def save(self, version: int) -> None:
        """Compacts what was trained, or told as ended, up to ``version`` into the frontier and a number."""
        trained = [item for item, at in self.trained_at.items() if at <= version]
        told = [item for item, one in self.ended.items() if one.version is not None and one.version <= version]
        positions = [self.ended.pop(item).note.position for item in told]
        for item in trained:
            del self.trained_at[item]
            positions.append(self.pool.items.pop(item).prompt.position)
        self.durable += len(trained)
        self._set_frontier(self.frontier.with_ended(positions))
        self._durable_version = max(self._durable_version, version)

    # -- back --------------------------------------------------------------------------------------------------
    def start_from(self, version: int, frontier: Frontier) -> None:
        """A new incarnation starts from ``version``: what lies behind it is undone, ``frontier`` is durable."""
        self._forks.append(version)
        self._queue_undone(version)
        given = Frontier(base=frontier.base).with_ended(list(frontier.beyond))
        if version < self._durable_version:
            self._restart_at(given)
        else:
            self._extend_to(given)
        self._durable_version = version

    def _queue_undone(self, version: int) -> None:
        undone = [item for _, held in self.batches.values() for item in held]
        self.batches.clear()
        for item, at in list(self.trained_at.items()):
            if at > version:
                del self.trained_at[item]
                undone.append(item)
        for item, held in list(self.buffer.items()):
            if self.abandoned(held.tokens_per_version, held.incarnation):
                del self.buffer[item]
                undone.append(item)
        for lease_id, grant in list(self.pool.grants.items()):
            if grant.policy_version > version:
                del self.pool.grants[lease_id]
                undone.append(grant.item)
        for item in undone:
            self.pool.queue(item)
        for item, one in self.ended.items():
            if one.version is not None and one.version > version:
                self.ended[item] = Ended(one.note)

    def _extend_to(self, given: Frontier) -> None:
        """Everything up to ``given`` counts as durable too; positions never fed here count as fed."""
        before = self.frontier
        self._set_frontier(Frontier(base=max(before.base, given.base)).with_ended([*before.beyond, *given.beyond]))
        absorbed, told = self._drop_durable()
        unknown = _size(self.frontier) - _size(before) - absorbed - told
        self.fed += unknown
        self.durable += unknown + absorbed

    def _restart_at(self, given: Frontier) -> None:
        """The learner went back behind its last durable version: what lies after ``given`` will be fed again."""
        self._set_frontier(given)
        self._drop_durable()
        self.dead = {}
        for item, one in list(self.ended.items()):
            self.ended[item] = replace(one, note=replace(one.note, reason=tally(self.dead, one.note.reason)))
        self.durable = _size(given)
        self.fed = self.durable + len(self.pool.items) + len(self.ended)

    def _drop_durable(self) -> tuple[int, int]:
        """Forgets the live and the ended items that are durable now; returns how many of each."""
        live = [item for item, one in self.pool.items.items() if self._is_durable(one.prompt.position)]
        told = [item for item, one in self.ended.items() if self._is_durable(one.note.position)]
        for item in live:
            self.pool.forget(item)
            self.buffer.pop(item, None)
            self.trained_at.pop(item, None)
        for lease_id, grant in list(self.pool.grants.items()):
            if grant.item not in self.pool.items:
                del self.pool.grants[lease_id]
        for item in told:
            del self.ended[item]
        return len(live), len(told)

    def _is_durable(self, position: int) -> bool:
        return position < self.frontier.base or position in self._beyond

    def _set_frontier(self, frontier: Frontier) -> None:
        self.frontier, self._beyond = frontier, frozenset(frontier.beyond)


def _size(frontier: Frontier) -> int:
    return frontier.base + len(frontier.beyond)
