"""What every broker backend promises; one contract suite runs over all of them.

Every method is safe to repeat: a second call with the same arguments changes nothing more.
Waiting methods block until their condition holds, the run ends, or ``wait_s`` has passed, whichever is first.
A client object belongs to one thread; open another one for another thread.
All methods raise BrokerUnreachable when the broker stays silent for ``broker.reconnect_timeout_s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from broker.messages import Batch, DeadItem, Frontier, Group, Lease, Member, Prompt, Publication, Rules, RunState


class PushOutcome(StrEnum):
    """What became of a pushed group."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the item was answered before, or its lease went to someone else
    ABANDONED = "abandoned"  # sampled by a policy that a restarted learner has given up; the prompt is queued again


class Broker(Protocol):
    """The client's view of the broker."""

    # -- the learner -------------------------------------------------------------------------------------------
    def open_run(self, *, rules: Rules, version: int, frontier: Frontier, after: int = -1, unsaved: int = 0) -> int:
        """Starts a learner incarnation at ``version`` and returns its number: one more than the last, above ``after``.

        ``after``: the last number that this learner knows of, for a broker that has forgotten it. Numbers are what
        tells the weights of an abandoned lineage from ours, so none may be given twice. ``unsaved``: positions of
        ``frontier`` that no checkpoint has yet, for a broker that has forgotten that they were trained; until the next
        ``durable`` the books show them as trained.

        Rolls the ledger back to ``version``: items trained later and items in batches are queued again, groups
        sampled by later versions are discarded and their prompts queued again. Items within ``frontier`` count as
        durable and are never queued again.
        """

    def feed(self, prompts: Sequence[Prompt]) -> int:
        """Queues prompts that the ledger does not know yet and returns how many those were.

        Training prompts are known by ``item``. Evaluation prompts form one round per learner version; a new round
        forgets the one before.
        """

    def take_batch(self, *, version: int, wait_s: float) -> Batch | None:
        """The batch to train at learner version ``version``, or None when none is ready within ``wait_s``.

        ``groups_per_step`` groups, the ones that lose most tokens at the next version first (ties: oldest first).
        Groups with nothing left to train at ``version`` are counted as ``stale`` and their prompts queued again, and
        so are groups that cannot be read (``malformed``; for their prompts it counts as an attempt).
        Repeating the call before ``trained`` returns the same batch. Raises RunFinished.
        """

    def trained(self, *, batch_id: str, version: int) -> None:
        """The batch has become part of policy ``version`` (after the optimizer step, never before)."""

    def durable(self, *, version: int) -> None:
        """A complete checkpoint of ``version`` exists: items trained up to it are durable."""

    def eval_results(self, *, version: int, count: int, wait_s: float) -> tuple[Group, ...]:
        """The answered evaluation groups of the round at ``version``: all ``count``, or those there after wait_s."""

    def publish(self, publication: Publication) -> None:
        """Announces where a policy version can be received."""

    def finish(self, reason: str) -> None:
        """Ends the run: waiting calls return or raise RunFinished. The first reason stays."""

    # -- generators --------------------------------------------------------------------------------------------
    def lease(
        self, *, member_id: str, policy_version: int, incarnation: int, max_prompts: int, wait_s: float
    ) -> tuple[Lease, ...]:
        """Leases up to ``max_prompts`` prompts to a generator that holds ``policy_version`` of ``incarnation``.

        No call leases more than broker.rules.PROMPTS_PER_CALL.
        Admission (broker/rules.py). Evaluation prompts go first and need the learner's own version.
        Empty after ``wait_s``. Raises RunFinished.
        """

    def push(self, group: Group) -> PushOutcome:
        """Delivers a group; it is in the ledger when this returns.

        Waits while the buffer is full (``broker.max_buffer_bytes``). Raises BufferFull after ``broker.push_timeout_s``.
        """

    def push_all(self, groups: Sequence[Group]) -> tuple[PushOutcome, ...]:
        """Delivers groups together, for less than one by one; each is taken or not as by ``push``.

        Raises Refused for one of them that cannot be taken, with the outcomes of those before it that were settled;
        and BufferFull, when those before it may have been taken.
        """

    def release(self, *, lease_id: str, error: str) -> None:
        """Gives a lease back unanswered; with an ``error`` the attempt counts, without it does not."""

    # -- members -----------------------------------------------------------------------------------------------
    def report(self, member: Member) -> None:
        """Joins, or refreshes: state, version in use, heartbeat, and renewal of the leases named. GONE leaves.

        Raises Refused when a newer process has joined under the same id.
        """

    def publication(self, *, after_attempt: int, wait_s: float) -> Publication | None:
        """The newest publication if its attempt is above ``after_attempt``, else None after ``wait_s``."""

    # -- operators ---------------------------------------------------------------------------------------------
    def dead_items(self) -> tuple[DeadItem, ...]:
        """The training prompts given up, by position; of very many, the newest."""

    def requeue(self, items: Sequence[str]) -> int:
        """Queues dead prompts again, with all their attempts; returns how many of these there were."""

    # -- weights on their way ----------------------------------------------------------------------------------
    @property
    def max_blob_bytes(self) -> int:
        """How many bytes all blobs together may have: ``broker.max_blob_bytes`` of this client."""

    def put_blob(self, name: str, data: bytes) -> None:
        """Keeps ``data`` under ``name`` until it is swept away, in place of what was there. Needs no open run.

        Raises Refused when all blobs together would be over ``broker.max_blob_bytes``, or this one over
        ``broker.max_frame_bytes``. Blobs are in the broker's memory and gone with it.
        """

    def get_blob(self, name: str) -> bytes | None:
        """The blob under ``name``, anything that has its bytes as a buffer; None when there is none."""

    def sweep_blobs(self, keep: Sequence[str]) -> int:
        """Forgets every blob whose name begins with none of ``keep``; returns how many those were."""

    # -- everyone ----------------------------------------------------------------------------------------------
    def state(self, *, after_revision: int = -1, wait_s: float = 0.0) -> RunState:
        """A consistent look. Waits for a revision above ``after_revision``.

        The revision grows when a member joins, leaves, or changes state, version or error, and when the learner's
        version, the incarnation or ``finished`` changes; not with every heartbeat or lease.
        """

    def close(self) -> None:
        """Closes this client; later calls raise BrokerClosed."""
