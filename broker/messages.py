"""The vocabulary: everything that crosses a process border between the roles.

Legend: P prompt tokens, L completion tokens, R runs of equal policy version.

A group travels as  Prompt -> Lease -> Group -> Batch, and every message here is frozen and keyword-only.
Only the standard library and numpy are imported, so that the broker runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 3

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]


class Split(StrEnum):
    """What a prompt is for: training items are in the ledger, evaluation items are answered and forgotten."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One dataset item of one epoch, with how it is to be sampled.

    Attributes:
        item: id, unique in a run: ``str(position)`` for training, ``"eval<version>.<i>"`` for evaluation.
        position: place in the endless feed over all epochs, counted from 0 (evaluation: index in the set).
        epoch: ``position // len(dataset)``.
        token_ids: [P] the prompt as the policy sees it.
        text: the prompt as people and rewards see it.
        reference: what the reward function compares with (an answer, a JSON text, or empty).
        n: completions asked for.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: longest completion, in tokens.
        seed: base seed of this item; the sampler derives one per completion and attempt.
    """

    item: str
    position: int
    epoch: int
    split: Split
    token_ids: Int32Array
    text: str
    reference: str
    n: int
    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right of one generator to answer one prompt, until it expires without a heartbeat."""

    lease_id: str
    prompt: Prompt
    attempt: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer. Token ids, log-probabilities, loss mask and versions grow together.

    Attributes:
        token_ids: [L] sampled (and, with environments, inserted) tokens.
        behavior_logprobs: [L] log-probability of each token under the distribution sampled from.
        loss_mask: [L] 1 where the policy sampled the token, 0 where an environment inserted it.
        version_runs: [R, 2] (policy_version, number of tokens); the counts sum to L.
        finish_reason: ``"stop"``, ``"length"`` or ``"timeout"``.
        reward: the scalar trained on.
        reward_parts: named parts, for people.
        text: decoded answer, for rewards and people; never re-encoded.
    """

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    loss_mask: UInt8Array
    version_runs: Int32Array
    finish_reason: str
    reward: float
    reward_parts: dict[str, float]
    text: str

    def versions(self) -> Int32Array:
        """[L] policy version of each token."""
        return np.repeat(self.version_runs[:, 0], self.version_runs[:, 1]).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt, as sampled under one lease."""

    lease_id: str
    prompt: Prompt
    generator: str
    incarnation: int
    completions: tuple[Completion, ...]
    failed_completions: int
    generation_s: float

    def tokens_per_version(self) -> dict[int, int]:
        """Tokens that carry loss, by the policy version that sampled them."""
        counts: dict[int, int] = {}
        for one in self.completions:
            start, whole = 0, np.count_nonzero(one.loss_mask) == len(one.loss_mask)
            for version, size in one.version_runs.tolist():
                carried = size if whole else int(np.count_nonzero(one.loss_mask[start : start + size]))
                start += size
                if carried:
                    counts[version] = counts.get(version, 0) + carried
        return counts


@dataclass(frozen=True, kw_only=True)
class EndedItem:
    """A training item that will not be trained: ``state`` is ``"filtered"`` or ``"dead"``."""

    item: str
    position: int
    state: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DeadItem:
    """A prompt given up after ``max_attempts``, which can be queued again. ``error``: of the last attempt."""

    item: str
    position: int
    attempts: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The groups of one learner step at ``version``; the same call returns the same batch until it is trained."""

    batch_id: str
    version: int
    incarnation: int
    groups: tuple[Group, ...]
    ended: tuple[EndedItem, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the learner asks of the broker for this run.

    Attributes:
        max_staleness: η, the bound in learner steps.
        on_stale: ``"mask"`` or ``"drop"``.
        groups_per_step: B.
        max_attempts: leases of one item before it is dead.
        lease_timeout_s: a lease without heartbeat for this long returns its prompt.
        member_timeout_s: a member without heartbeat for this long is gone.
        max_buffer_bytes: of delivered groups; beyond it nothing is leased, and pushes wait unless the batch being
            gathered needs them (so at most B groups more are held).
        run: name of the training run; a ledger that holds another run's items forgets them.
    """

    max_staleness: int
    on_stale: str
    groups_per_step: int
    max_attempts: int
    lease_timeout_s: float
    member_timeout_s: float
    max_buffer_bytes: int = 1 << 53
    run: str = ""

    @property
    def window(self) -> int:
        """Outstanding groups allowed: (η + 1) · B."""
        return (self.max_staleness + 1) * self.groups_per_step


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The data position: every position below ``base`` has ended, and so have those in ``beyond``."""

    base: int = 0
    beyond: tuple[int, ...] = ()

    def with_ended(self, positions: list[int]) -> Frontier:
        """The frontier after these positions have ended too."""
        ended = set(self.beyond) | {p for p in positions if p >= self.base}
        base = self.base
        while base in ended:
            ended.remove(base)
            base += 1
        return Frontier(base=base, beyond=tuple(sorted(ended)))

    @property
    def size(self) -> int:
        """How many positions have ended."""
        return self.base + len(self.beyond)

    def has(self, position: int) -> bool:
        """Whether this position has ended."""
        return position < self.base or position in self.beyond


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Where a policy version can be received: state that is read, never a notice that can be missed.

    Attributes:
        version: policy version on offer.
        incarnation: of the learner.
        attempt: +1 for every try at sending, over the whole run: names the transfer.
        epoch: +1 whenever the membership of the transfer group changes: names the group.
        store: ``host:port`` of the learner's store.
        receivers: member ids in rank order; receiver i has rank i + 1 in every transfer group, the sender rank 0.
        senders: learner ranks that each send a part of the version, one after the other.
    """

    version: int
    incarnation: int
    attempt: int
    epoch: int
    store: str
    receivers: tuple[str, ...]
    senders: int = 1


class MemberState(StrEnum):
    """What a member is doing; only ``serving`` generators lease.

    ``stale`` and ``suspect`` are the broker's view (broker/standing.py): nobody reports them of itself.
    """

    STARTING = "starting"
    SYNCING = "syncing"
    SERVING = "serving"
    STALE = "stale"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that takes part, as it last reported itself.

    Attributes:
        policy_version: the version in use, -1 before the first.
        leases: ids it still works on; renewing them is the heartbeat's second duty.
        stats: small named numbers for people, such as ``tokens_per_s``.
        error: the last error, empty if none.
        life: a name that only this process has. Of two with one id the newer is the member; the older is refused.
    """

    member_id: str
    role: str
    state: MemberState
    policy_version: int
    incarnation: int
    host: str
    pid: int
    leases: tuple[str, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)
    error: str = ""
    life: str = ""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The ledger's books: every training item ever fed is in exactly one state."""

    fed: int
    queued: int
    leased: int
    buffered: int
    training: int
    trained: int
    durable: int
    filtered: dict[str, int]
    dead: dict[str, int]
    events: dict[str, int]

    def total(self) -> int:
        """Sum over all states; equals ``fed`` or the books are wrong."""
        live = self.queued + self.leased + self.buffered + self.training + self.trained + self.durable
        return live + sum(self.filtered.values()) + sum(self.dead.values())

    def thrown_away(self) -> int:
        """Groups delivered and not trained because of their age, over the run; their prompts were queued again."""
        return self.events.get("stale", 0) + self.events.get("dropped", 0)

    def balanced(self) -> bool:
        """Whether the books add up."""
        return self.total() == self.fed


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One consistent look at the broker, for dashboards, the publisher and the launcher."""

    revision: int
    incarnation: int
    version: int
    finished: str
    rules: Rules | None
    counts: Counts
    members: tuple[Member, ...]
    publication: Publication | None
    buffered_bytes: int
