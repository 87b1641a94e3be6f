"""The training items and the states they are in: every transition of the ledger that moves one.

``pool`` holds the prompts (queued, leased), ``held`` the delivered groups, of which those in no batch are the
``buffer``, ``batches`` what is being trained, ``trained_at`` the version each trained item went into, ``ended`` what
the learner is still to be told or to save, ``dead`` the prompts that were given up, ``frontier`` the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from broker import rules as staleness
from broker.heads import BatchHead, GroupHead, position_of
from broker.messages import Counts, DeadItem, EndedItem, Frontier, Rules
from broker.pool import Item, Pool
from broker.reasons import tally, untally
from broker.rows import Rows

DEAD_KEPT = 1024  # prompts given up that can still be queued again; older ones are only counted


@dataclass(frozen=True)
class Held:
    """A delivered group. ``incarnation`` is the oldest one it may have tokens of."""

    head: GroupHead
    incarnation: int
    arrival: int
    body: bytes

    @property
    def tokens_per_version(self) -> dict[int, int]:
        """Tokens that carry loss, by policy version."""
        return {pair[0]: pair[1] for pair in self.head.tokens}


@dataclass(frozen=True)
class Ended:
    """An item that ended untrained; ``version`` is the policy version whose batch tells the learner of it."""

    note: EndedItem
    version: int | None = None


@dataclass(frozen=True)
class Dead:
    """A prompt given up, with what it takes to try it again."""

    prompt: bytes
    attempts: int
    error: str
    reason: str


class TrainingItems:
    """Containers and transitions. An item is in exactly one container, which ``counts`` relies on."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.held: Rows[str, Held] = Rows()
        self.buffer: dict[str, Held] = {}
        self.batches: Rows[int, BatchHead] = Rows()
        self.trained_at: Rows[str, int] = Rows()
        self.ended: Rows[str, Ended] = Rows()
        self.dead: Rows[str, Dead] = Rows()
        self.frontier = Frontier()
        self.fed = 0
        self.durable = 0
        self.unsaved = 0  # of those durable: what only the learner's own memory has until its next checkpoint
        self.dead_counts: dict[str, int] = {}
        self.events: Counter[str] = Counter()
        self.held_bytes = 0
        self.durable_version = -1
        self.forks: list[int] = []  # forks[i]: the version that incarnation i started from
        self.requeued: set[int] = set()  # positions that are live again although the frontier may hold them
        self._beyond: frozenset[int] = frozenset()
        self._scanned_version = -1

    # -- looking -----------------------------------------------------------------------------------------------
    def counts(self) -> Counts:
        """The books, each state counted where its items are."""
        return Counts(
            fed=self.fed,
            queued=len(self.pool.queued),
            leased=len(self.pool.grants),
            buffered=len(self.buffer),
            training=self.in_batches(),
            trained=len(self.trained_at) + self.unsaved,
            durable=self.durable - self.unsaved,
            filtered={},
            dead=dict(sorted(self.dead_counts.items())),
            events={name: count for name, count in sorted(self.events.items()) if count},
        )

    def in_batches(self) -> int:
        """Groups in batches out."""
        return len(self.held) - len(self.buffer)

    def outstanding(self) -> int:
        """Groups leased, buffered or in batches: what the window bounds."""
        return len(self.pool.grants) + len(self.held)

    def may_sample_more(self, rules: Rules) -> bool:
        """Whether the bytes held allow one more lease."""
        return staleness.may_sample_more(
            held_bytes=self.held_bytes,
            leased=len(self.pool.grants),
            buffered=len(self.buffer),
            groups_per_step=rules.groups_per_step,
            max_buffer_bytes=rules.max_buffer_bytes,
        )

    def has_room(self, size: int, rules: Rules) -> bool:
        """Whether a group of ``size`` bytes would be taken in now."""
        return staleness.has_room(
            held_bytes=self.held_bytes,
            size=size,
            buffered=len(self.buffer),
            groups_per_step=rules.groups_per_step,
            max_buffer_bytes=rules.max_buffer_bytes,
        )

    def abandoned(self, versions: Iterable[int], incarnation: int) -> bool:
        """Whether a later incarnation has started from before one of these versions."""
        later = min(self.forks[max(0, incarnation + 1) :], default=None)
        return later is not None and any(version > later for version in versions)

    # -- forward -----------------------------------------------------------------------------------------------
    def feed(self, item: str, prompt: bytes) -> bool:
        """Queues an item unless it is known."""
        if self._is_durable(position_of(item)) or item in self.pool.items or item in self.ended:
            return False
        self.pool.add(item, prompt)
        self.fed += 1
        return True

    def hold(self, held: Held) -> None:
        """Puts a delivered group into the buffer."""
        self.held[held.head.item] = self.buffer[held.head.item] = held
        self.held_bytes += len(held.body)

    def end(self, item: str, what: Item) -> None:
        """Counts an item out whose last attempt has failed; the next batch tells the learner."""
        reason = tally(self.dead_counts, what.error)
        note = EndedItem(item=item, position=position_of(item), state="dead", reason=reason)
        self.ended[item] = Ended(note)
        self.dead[item] = Dead(what.prompt, what.failed_attempts, what.error, reason)
        while len(self.dead) > DEAD_KEPT:
            del self.dead[next(iter(self.dead))]

    def return_stale(self, version: int, rules: Rules) -> int:
        """Queues the prompts of groups that have nothing to give at ``version``; returns how many.

        Looks only where it can matter: at a version not looked at before, or when there is enough for a batch.
        """
        if version == self._scanned_version and len(self.buffer) < rules.groups_per_step:
            return 0
        self._scanned_version = version
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
            self._drop_group(item)
            self.pool.queue(item)
        self.events["dropped" if rules.on_stale == "drop" else "stale"] += len(stale)
        return len(stale)

    def assemble(self, *, batch_id: str, version: int, incarnation: int, rules: Rules) -> BatchHead:
        """Moves the groups that lose most at ``version + 1`` into a batch."""

        def urgency(entry: tuple[str, Held]) -> tuple[int, int]:
            tokens = entry[1].tokens_per_version
            lost = staleness.tokens_lost_next(tokens, version=version, max_staleness=rules.max_staleness)
            return -lost, entry[1].arrival

        chosen = [item for item, _ in sorted(self.buffer.items(), key=urgency)[: rules.groups_per_step]]
        for item in chosen:
            del self.buffer[item]
        untold = sorted((one for one in self.ended.values() if one.version is None), key=lambda o: o.note.position)
        for one in untold:
            self.ended[one.note.item] = replace(one, version=version + 1)
        self.batches[version] = BatchHead(
            batch_id=batch_id,
            version=version,
            incarnation=incarnation,
            items=tuple(chosen),
            lease_ids=tuple(self.held[item].head.lease_id for item in chosen),
            ended=tuple(one.note for one in untold),
        )
        return self.batches[version]

    def train(self, version: int) -> None:
        """The batch for ``version - 1`` has become part of ``version``; its groups are not needed any more."""
        items = self.batches[version - 1].items
        del self.batches[version - 1]
        for item in items:
            self._drop_group(item)
        self.trained_at.put_all(items, version)

    def save(self, version: int) -> None:
        """Compacts what was trained, or told as ended, up to ``version`` into the frontier and a number."""
        trained = [item for item, at in self.trained_at.items() if at <= version]
        told = [item for item, one in self.ended.items() if one.version is not None and one.version <= version]
        for item in told:
            del self.ended[item]
        for item in trained:
            del self.trained_at[item]
            self.pool.forget(item)
        self.durable += len(trained)
        self.unsaved = 0
        positions = [position_of(item) for item in (*told, *trained)]
        self.requeued.difference_update(positions)
        self._set_frontier(self.frontier.with_ended(positions))
        self.durable_version = max(self.durable_version, version)

    # -- back --------------------------------------------------------------------------------------------------
    def take_apart(self, version: int) -> None:
        """Batches from ``version`` on were never trained and cannot be: their groups wait in the buffer again."""
        for one in [one for one in self.batches if one >= version]:
            for item in self.batches[one].items:
                self.buffer[item] = self.held[item]
            for note in self.batches[one].ended:
                self.ended[note.item] = Ended(note)
            del self.batches[one]

    def spoil(self, item: str, *, error: str, max_attempts: int) -> None:
        """A buffered group turned out to be unreadable: that attempt has failed."""
        self._drop_group(item)
        self.put_back(item, error=error, max_attempts=max_attempts)

    def put_back(self, item: str, *, error: str, max_attempts: int) -> None:
        """Queues the item of a failed attempt again, or ends it."""
        ended = self.pool.put_back(item, error=error, max_attempts=max_attempts)
        if ended is not None:
            self.end(*ended)

    def dead_items(self) -> tuple[DeadItem, ...]:
        """The prompts given up that can be queued again, by position."""
        listed = sorted(self.dead.items(), key=lambda entry: position_of(entry[0]))
        return tuple(
            DeadItem(item=item, position=position_of(item), attempts=one.attempts, error=one.error)
            for item, one in listed
        )

    def requeue(self, items: Sequence[str]) -> int:
        """Gives these dead prompts all their attempts again; returns how many there were."""
        there = [item for item in dict.fromkeys(items) if item in self.dead]
        for item in there:
            dead = self.dead[item]
            del self.dead[item]
            self.ended.take(item)
            untally(self.dead_counts, dead.reason)
            self.requeued.add(position_of(item))
            self.pool.add(item, dead.prompt)
        self.events["requeued"] += len(there)
        return len(there)

    def start_from(self, version: int, frontier: Frontier, *, incarnation: int, another_run: bool = False) -> None:
        """A new incarnation starts from ``version``: what lies behind it is undone, ``frontier`` is durable.

        Incarnations that this ledger does not know started from here too, as far as it can tell. In another run
        nothing that was there is known any more, and every group sampled before is abandoned.
        """
        if another_run:
            self._forget()
        self.forks += [-1 if another_run else version] * (incarnation + 1 - len(self.forks))
        self._scanned_version = -1
        self._queue_undone(version)
        given = Frontier(base=frontier.base).with_ended(list(frontier.beyond))
        if version < self.durable_version:
            self._restart_at(given)
        else:
            self._extend_to(given)
        self.durable_version = version

    def _forget(self) -> None:
        self.pool.forget_all()
        for rows in (self.held, self.batches, self.trained_at, self.ended, self.dead):
            rows.remove_all()
        for container in (self.buffer, self.dead_counts, self.events, self.requeued):
            container.clear()
        self.fed = self.durable = self.held_bytes = 0
        self.durable_version = self._scanned_version = -1
        self._set_frontier(Frontier())

    def restored(self, *, expires_at: float) -> None:
        """After the rows were read back: what follows from them."""
        taken = {item for batch in self.batches.values() for item in batch.items}
        self.buffer = {item: held for item, held in self.held.items() if item not in taken}
        self.held_bytes = sum(len(held.body) for held in self.held.values())
        self._set_frontier(self.frontier)
        self.pool.restored(elsewhere=self.held.keys() | self.trained_at.keys(), expires_at=expires_at)

    def _drop_group(self, item: str) -> None:
        held = self.held.take(item)
        if held is not None:
            self.buffer.pop(item, None)
            self.held_bytes -= len(held.body)

    def _queue_undone(self, version: int) -> None:
        undone = [item for batch in self.batches.values() for item in batch.items]
        self.batches.remove_all()
        undone += [item for item, at in self.trained_at.items() if at > version]
        undone += [
            item for item, held in self.buffer.items() if self.abandoned(held.tokens_per_version, held.incarnation)
        ]
        for item in undone:
            self._drop_group(item)
            self.trained_at.take(item)
        for lease_id, grant in list(self.pool.grants.items()):
            if grant.policy_version > version:
                undone.append(self.pool.end(lease_id).item)
        for item in undone:
            self.pool.queue(item)
        for item, one in list(self.ended.items()):
            if one.version is not None and one.version > version:
                self.ended[item] = Ended(one.note)

    def _extend_to(self, given: Frontier) -> None:
        """Everything up to ``given`` counts as durable too; positions never fed here count as fed."""
        before = self.frontier
        self._set_frontier(Frontier(base=max(before.base, given.base)).with_ended([*before.beyond, *given.beyond]))
        absorbed, told = self._drop_durable()
        live = sum(self.frontier.has(one) and not before.has(one) for one in self.requeued)
        unknown = self.frontier.size - before.size - absorbed - told - live
        self.fed += unknown
        self.durable += unknown + absorbed

    def _restart_at(self, given: Frontier) -> None:
        """The learner went back behind its last durable version: what lies after ``given`` will be fed again."""
        self._set_frontier(given)
        self._drop_durable()
        self.dead_counts = {}
        for item, one in list(self.ended.items()):
            reason = tally(self.dead_counts, one.note.reason)
            self.ended[item] = replace(one, note=replace(one.note, reason=reason))
        for item, dead in list(self.dead.items()):
            if item in self.ended:
                self.dead[item] = replace(dead, reason=self.ended[item].note.reason)
            else:
                del self.dead[item]
        self.durable = given.size - sum(given.has(one) for one in self.requeued)
        self.fed = self.durable + len(self.pool.items) + len(self.ended)

    def _drop_durable(self) -> tuple[int, int]:
        """Forgets the live and the ended items that are durable now; returns how many of each."""
        live = [item for item in self.pool.items if self._is_durable(position_of(item))]
        told = [item for item, one in self.ended.items() if self._is_durable(one.note.position)]
        for item in live:
            self.pool.forget(item)
            self._drop_group(item)
            self.trained_at.take(item)
        for lease_id, grant in list(self.pool.grants.items()):
            if grant.item not in self.pool.items:
                self.pool.end(lease_id)
        for item in told:
            del self.ended[item]
        return len(live), len(told)

    def _is_durable(self, position: int) -> bool:
        known = position < self.frontier.base or position in self._beyond
        return known and position not in self.requeued

    def _set_frontier(self, frontier: Frontier) -> None:
        self.frontier, self._beyond = frontier, frozenset(frontier.beyond)
