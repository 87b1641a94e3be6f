"""The ledger: which state every training item is in, as a state machine without clock, threads or I/O.

    fed -> queued -> leased -> buffered -> training -> trained(v) -> durable(v)      or -> dead(reason)

Prompts and groups are bodies that it keeps and hands on unread; it decides by their heads (broker/heads.py).
After the optimizer step only the item's prompt and version are kept, and after the checkpoint only the number of
durable items and the frontier: memory stays in the order of the window plus what was trained since the checkpoint.
Time comes in as ``now`` (seconds on any clock). broker/lua holds the same machine for Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker import rules as staleness
from broker.blobs import Blobs
from broker.contract import PushOutcome
from broker.errors import NoOpenRun, Refused, RunFinished
from broker.evaluation import EvaluationRound
from broker.heads import BatchHead, GroupHead, LeaseHead, is_eval, refuse_misfit, refuse_misnamed_items
from broker.items import Held, TrainingItems
from broker.messages import DeadItem, Frontier, Member, MemberState, Publication, Rules, RunState
from broker.pool import Pool
from broker.reasons import printable, short
from broker.roster import Roster
from broker.standing import Course
from broker.wellformed import refuse_senseless


class Ledger:
    """Every contract method without the waiting; where a caller would wait, the answer is None or empty.

    ``changes`` grows with every step that could end somebody's wait.
    """

    def __init__(self) -> None:
        self.rules: Rules | None = None
        self.version = -1
        self.incarnation = -1
        self.finished = ""
        self.revision = 0
        self.changes = 0
        self.items = TrainingItems()
        self.evaluation = EvaluationRound()
        self.roster = Roster()
        self.newest: Publication | None = None
        self.events = self.items.events
        self.token = ""
        self.serial = 0
        self.blobs = Blobs()

    # -- the learner -------------------------------------------------------------------------------------------
    def open_run(
        self, *, rules: Rules, version: int, frontier: Frontier, token: str, after: int = -1, unsaved: int = 0
    ) -> int:
        """Starts an incarnation, numbered above ``after``. A repeated ``token`` is the same call sent again.

        ``unsaved``: positions of ``frontier`` that no checkpoint has yet; the books show them as trained.
        """
        refuse_senseless(rules=rules, version=version, frontier=frontier, after=after, token=token)
        if token != self.token:
            another_run = self.rules is not None and self.rules.run != rules.run
            self.rules, self.token = rules, token
            self.incarnation = max(self.incarnation, after) + 1
            self.items.start_from(version, frontier, incarnation=self.incarnation, another_run=another_run)
            self.items.unsaved = min(max(unsaved, 0), self.items.durable)
            self.evaluation.start(-1)
            self.version, self.finished = version, ""
            self._news()
        return self.incarnation

    def feed(self, items: Sequence[str], prompts: Sequence[bytes]) -> int:
        """Queues the unknown ones and returns how many those were."""
        self._open()
        refuse_misnamed_items(items)
        if len(items) != len(prompts):
            raise Refused(f"{len(items)} items were fed with {len(prompts)} prompts")
        fed = list(zip(items, prompts, strict=True))
        added = self.evaluation.feed([one for one in fed if is_eval(one[0])])
        added += sum(self.items.feed(item, prompt) for item, prompt in fed if not is_eval(item))
        self.changes += added
        return added

    def take_batch(self, *, version: int) -> BatchHead | None:
        """The batch for ``version``, the same one until it is trained; None when too few groups are ready."""
        rules, batches = self._open(), self.items.batches
        if self.finished:
            raise RunFinished(self.finished)
        if version in batches:
            return batches[version]
        due = staleness.next_training_version(self.version, len(batches))
        if version != due:
            raise Refused(
                f"a batch for version {version} was asked for; the learner is at {self.version} with "
                f"{len(batches)} batches out, so the next is for {due}"
            )
        self.changes += self.items.return_stale(version, rules)
        if len(self.items.buffer) < rules.groups_per_step:
            return None
        self.changes += 1
        return self.items.assemble(
            batch_id=self._batch_id(version), version=version, incarnation=self.incarnation, rules=rules
        )

    def bodies(self, batch: BatchHead) -> list[bytes]:
        """The groups of a batch that is out, in its order."""
        return [self.items.held[item].body for item in batch.items]

    def spoiled(self, *, version: int, lease_id: str, error: str) -> None:
        """A group of the batch for ``version`` cannot be read: the batch is undone, the group's attempt has failed."""
        rules, batch = self._open(), self.items.batches.get(version)
        if batch is not None and lease_id in batch.lease_ids:
            self.items.take_apart(version)
            item = batch.items[batch.lease_ids.index(lease_id)]
            self.items.spoil(item, error=short(error), max_attempts=rules.max_attempts)
            self.events["malformed"] += 1
            self.changes += 1

    def trained(self, *, batch_id: str, version: int) -> None:
        """Moves the batch's items to ``trained`` and the learner's version to ``version``."""
        self._open()
        named = batch_id == self._batch_id(version - 1)
        if named and version <= self.version:
            return
        if not named or version != self.version + 1 or version - 1 not in self.items.batches:
            raise Refused(
                f"batch {batch_id!r} cannot become version {version}: the learner of incarnation "
                f"{self.incarnation} is at version {self.version}, batches out for {sorted(self.items.batches)}"
            )
        self.items.train(version)
        self.version = version
        self._news()

    def durable(self, *, version: int) -> None:
        """Compacts what was trained up to ``version``."""
        self._open()
        if version > self.version:
            raise Refused(f"version {version} cannot be durable: the learner is at version {self.version}")
        self.items.save(version)

    def eval_results(self, *, version: int, count: int, last: bool) -> tuple[bytes, ...] | None:
        """The answers of the round at ``version``; None while fewer than ``count`` and not the ``last`` look."""
        self._open()
        answers = self.evaluation.results(version)
        return answers if len(answers) >= count or last or self.finished else None

    def publish(self, publication: Publication) -> None:
        """Keeps the newest announcement."""
        self._open()
        if publication == self.newest:
            return
        if publication.incarnation != self.incarnation:
            raise Refused(f"incarnation {publication.incarnation} publishes, but {self.incarnation} is open")
        if self.newest is not None and publication.attempt <= self.newest.attempt:
            raise Refused(
                f"publication attempt {publication.attempt} is not above {self.newest.attempt}: "
                "attempts are numbered over the whole run"
            )
        self.newest = publication
        self.changes += 1

    def finish(self, reason: str) -> None:
        """Ends the run once; the first reason stays."""
        if not self.finished:
            self.finished = reason or "finished"
            self._news()

    # -- generators --------------------------------------------------------------------------------------------
    def lease(
        self, *, member_id: str, policy_version: int, incarnation: int, max_prompts: int, now: float, token: str
    ) -> tuple[LeaseHead, ...]:
        """Evaluation first, then training prompts as admitted; empty when there is nothing for this generator.

        A repeated ``token`` is the same call sent again: it gets the leases that it was given and still holds.
        """
        if max_prompts < 1:
            raise Refused(f"a lease of {max_prompts} prompts")
        if self.finished:
            raise RunFinished(self.finished)
        if self.rules is None or incarnation != self.incarnation:
            return ()
        leases = [*self.evaluation.pool.granted(token), *self.items.pool.granted(token)]
        if leases:
            return tuple(leases)
        while (
            len(leases) < min(max_prompts, staleness.PROMPTS_PER_CALL)
            and (pool := self._pool_for(policy_version, self.rules)) is not None
        ):
            self.serial += 1
            lease = pool.grant(
                lease_id=f"{self.token[:8]}.{self.serial}",
                member_id=member_id,
                policy_version=policy_version,
                incarnation=incarnation,
                expires_at=now + self.rules.lease_timeout_s,
                token=token,
            )
            leases.append(lease)
        return tuple(leases)

    def prompt(self, lease: LeaseHead) -> bytes:
        """The prompt of a lease that holds."""
        pool = self.evaluation.pool if is_eval(lease.item) else self.items.pool
        return pool.items[lease.item].prompt

    def push(self, heads: Sequence[GroupHead], bodies: Sequence[bytes]) -> tuple[PushOutcome | None, ...]:
        """Takes groups in, each once, if its lease and its policy still hold; None where the buffer has no room for it.

        Raises Refused, and then has taken none.
        """
        if len(heads) != len(bodies):
            raise Refused(f"{len(heads)} groups were pushed with {len(bodies)} bodies")
        for head in heads:
            refuse_misfit(head)
            self._refuse_other_item(head)
        return tuple(self._push(head, body) for head, body in zip(heads, bodies, strict=True))

    def _push(self, head: GroupHead, body: bytes) -> PushOutcome | None:
        outcome = self._push_eval(head, body) if is_eval(head.item) else self._push_train(head, body)
        if outcome not in (PushOutcome.ACCEPTED, None):
            self.events[outcome.value] += 1
        self.changes += outcome is not None
        return outcome

    def worth_pushing(self, *, size: int, lease_ids: Sequence[str]) -> bool:
        """Whether a group of ``size`` bytes would be taken in now, or one of these leases no longer holds."""
        if self.finished:
            raise RunFinished(self.finished)
        if self.rules is None or any(one not in self.items.pool.grants for one in lease_ids):
            return True
        return self.items.has_room(size, self.rules)

    def release(self, *, lease_id: str, error: str) -> None:
        """Gives a lease back; with an error the attempt counts."""
        error = short(error)
        for pool in self._pools():
            if lease_id in pool.grants:
                self.events["failed" if error else "released"] += 1
                self._give_back(pool, lease_id, error)

    # -- members -----------------------------------------------------------------------------------------------
    def report(self, member: Member, now: float) -> None:
        """Joins or refreshes. A member that leaves gives its leases back, with its error if it has one."""
        member = replace(member, error=printable(member.error))
        if self.roster.report(member, now):
            self._news()
        for pool in self._pools():
            if member.state is MemberState.GONE:
                for lease_id in [one for one, grant in pool.grants.items() if grant.member_id == member.member_id]:
                    self.release(lease_id=lease_id, error=member.error)
            elif self.rules is not None:
                for lease_id in member.leases:
                    pool.renew(lease_id, member_id=member.member_id, expires_at=now + self.rules.lease_timeout_s)

    def publication(self, *, after_attempt: int) -> Publication | None:
        """The newest publication of the open incarnation, if above ``after_attempt``."""
        newest = self.newest
        current = newest is not None and newest.incarnation == self.incarnation and newest.attempt > after_attempt
        return newest if current else None

    # -- operators ---------------------------------------------------------------------------------------------
    def dead_items(self) -> tuple[DeadItem, ...]:
        """The training prompts given up that can still be queued again."""
        return self.items.dead_items()

    def requeue(self, items: Sequence[str]) -> int:
        """Queues dead prompts again, with all their attempts; returns how many there were."""
        self._open()
        count = self.items.requeue(items)
        self.changes += count
        return count

    # -- time --------------------------------------------------------------------------------------------------
    def expire(self, now: float) -> None:
        """Ends the leases and members whose time is over."""
        if self.rules is None:
            return
        for pool in self._pools():
            for lease_id in pool.expired(now):
                self.events["expired"] += 1
                text = f"lease expired: no heartbeat for broker.lease_timeout_s = {self.rules.lease_timeout_s:g}"
                self._give_back(pool, lease_id, text)
        lost = self.roster.expire(now, self.rules.member_timeout_s)
        self.events["members_lost"] += len(lost)
        for _ in lost:
            self._news()

    def next_deadline(self) -> float | None:
        """The earliest time at which ``expire`` may have something to do."""
        if self.rules is None:
            return None
        ends = [pool.next_end() for pool in self._pools()]
        ends.append(self.roster.next_end(self.rules.member_timeout_s))
        return min((end for end in ends if end is not None), default=None)

    def restored(self, now: float) -> None:
        """After a store has read everything back: every lease has its whole time again, and members will report."""
        expires_at = now + (self.rules.lease_timeout_s if self.rules else 0.0)
        self.items.restored(expires_at=expires_at)
        self.evaluation.pool.restored(elsewhere=set(), expires_at=expires_at)
        self.revision += 1

    # -- looking -----------------------------------------------------------------------------------------------
    def state(self, now: float) -> RunState:
        """A consistent look at everything."""
        course = Course(
            rules=self.rules,
            incarnation=self.incarnation,
            version=self.version,
            batches_out=len(self.items.batches),
        )
        return RunState(
            revision=self.revision,
            incarnation=self.incarnation,
            version=self.version,
            finished=self.finished,
            rules=self.rules,
            counts=self.items.counts(),
            members=self.roster.all(now, course),
            publication=self.newest,
            buffered_bytes=self.items.held_bytes,
        )

    # -- inside ------------------------------------------------------------------------------------------------
    def _open(self) -> Rules:
        if self.rules is None:
            raise NoOpenRun("the broker knows of no open run; a learner opens it")
        return self.rules

    def _news(self) -> None:
        self.revision += 1
        self.changes += 1

    def _pools(self) -> tuple[Pool, Pool]:
        return self.items.pool, self.evaluation.pool

    def _batch_id(self, version: int) -> str:
        return f"{self.incarnation}.{version}"

    def _pool_for(self, policy_version: int, rules: Rules) -> Pool | None:
        if self.evaluation.wants(policy_version):
            return self.evaluation.pool
        admitted = self.items.may_sample_more(rules) and staleness.admitted(
            policy_version=policy_version,
            version=self.version,
            batches_out=len(self.items.batches),
            outstanding=self.items.outstanding(),
            max_staleness=rules.max_staleness,
            window=rules.window,
        )
        return self.items.pool if admitted and self.items.pool.queued else None

    def _refuse_other_item(self, head: GroupHead) -> None:
        pool = self.evaluation.pool if is_eval(head.item) else self.items.pool
        grant = pool.grants.get(head.lease_id)
        if grant is not None and grant.item != head.item:
            raise Refused(f"lease {head.lease_id} is for item {grant.item}, not for {head.item}")

    def _push_eval(self, head: GroupHead, body: bytes) -> PushOutcome:
        abandoned = head.incarnation != self.incarnation
        return PushOutcome.ABANDONED if abandoned else self.evaluation.push(head, body)

    def _push_train(self, head: GroupHead, body: bytes) -> PushOutcome | None:
        pool, versions = self.items.pool, [version for version, _ in head.tokens]
        grant = pool.grants.get(head.lease_id)
        if grant is None:
            known_abandoned = self.items.abandoned(versions, head.incarnation)
            return PushOutcome.ABANDONED if known_abandoned else PushOutcome.DUPLICATE
        # The generator may have begun under the lease's incarnation and name a later one: the older one decides.
        incarnation = min(head.incarnation, grant.incarnation)
        if self.items.abandoned(versions, incarnation):
            pool.end(head.lease_id)
            pool.queue(grant.item)
            return PushOutcome.ABANDONED
        if not self.items.has_room(len(body), self._open()):
            return None
        pool.end(head.lease_id)
        self.serial += 1
        self.items.hold(Held(head, incarnation, self.serial, body))
        return PushOutcome.ACCEPTED

    def _give_back(self, pool: Pool, lease_id: str, error: str) -> None:
        self.changes += 1
        home = self.items if pool is self.items.pool else pool
        home.put_back(pool.end(lease_id).item, error=error, max_attempts=self._open().max_attempts)
