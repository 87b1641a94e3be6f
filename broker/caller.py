"""The contract's methods in terms of calls, for every client: a backend only says how a call is answered."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from broker import calls
from broker.calls import Bodies, Call
from broker.codec import decode, encode
from broker.config import BrokerConfig
from broker.contract import PushOutcome
from broker.errors import BrokerClosed, BufferFull, Refused
from broker.heads import GroupHead, refuse_misnamed, round_version
from broker.messages import Batch, DeadItem, Frontier, Group, Lease, Member, Prompt, Publication, Rules, RunState
from broker.reasons import printable, short
from broker.rules import GROUPS_PER_CALL, PROMPTS_PER_CALL
from broker.wellformed import refuse_malformed

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_PUSH_PAUSE_S, LAST_PUSH_PAUSE_S = 0.05, 1.0  # between two tries at a full buffer
CALL_BYTES = 1 << 20  # of several prompts or groups: a slow link is to have sent them before it looks dead


def fresh_token() -> str:
    """A name that no other call has."""
    return uuid.uuid4().hex


class Caller(ABC):
    """broker.contract.Broker over one operation: ``_exchange``."""

    def __init__(self, config: BrokerConfig, *, token: Callable[[], str] = fresh_token) -> None:
        self._config = config
        self._token = token
        self._closed = False

    @abstractmethod
    def _exchange(self, call: Call[T], bodies: Bodies, wait_s: float) -> tuple[T, Bodies]:
        """The answer to a call with its bodies, waiting up to ``wait_s`` where the call can wait."""

    def _call(self, call: Call[T], *, bodies: Bodies = (), wait_s: float = 0.0) -> T:
        return self._call_for_bodies(call, bodies=bodies, wait_s=wait_s)[0]

    def _call_for_bodies(self, call: Call[T], *, bodies: Bodies = (), wait_s: float = 0.0) -> tuple[T, Bodies]:
        if self._closed:
            raise BrokerClosed("this client of the broker is closed")
        return self._exchange(call, bodies, wait_s)

    def _sendable(self, kind: str, bodies: list[bytes]) -> list[bytes]:
        """The bodies as they are. Raises Refused if one is too large, before any of them is sent."""
        largest, limit = max(map(len, bodies), default=0), self._config.max_frame_bytes
        if largest > limit:
            raise Refused(f"a {kind} of {largest} bytes is over broker.max_frame_bytes = {limit}")
        return bodies

    # -- the learner -------------------------------------------------------------------------------------------
    def open_run(self, *, rules: Rules, version: int, frontier: Frontier, after: int = -1, unsaved: int = 0) -> int:
        """See broker.contract.Broker. Every call is a new incarnation; one sent again by the client is not."""
        call = calls.OpenRun(
            rules=rules, version=version, frontier=frontier, after=after, unsaved=unsaved, token=self._token()
        )
        return self._call(call)

    def feed(self, prompts: Sequence[Prompt]) -> int:
        """See broker.contract.Broker."""
        refuse_misnamed(prompts)
        items, bodies = tuple(one.item for one in prompts), self._sendable("prompt", [encode(one) for one in prompts])
        return sum(
            self._call(calls.Feed(items=items[part]), bodies=bodies[part])
            for part in self._parts(bodies, PROMPTS_PER_CALL)
        )

    def take_batch(self, *, version: int, wait_s: float) -> Batch | None:
        """See broker.contract.Broker."""
        until = time.monotonic() + wait_s
        while True:
            left = max(0.0, until - time.monotonic())
            head, bodies = self._call_for_bodies(calls.TakeBatch(version=version), wait_s=left)
            if head is None:
                return None
            groups: list[Group] = []
            for lease_id, item, body in zip(head.lease_ids, head.items, bodies, strict=True):
                try:
                    groups.append(self._readable(body, lease_id, item))
                except Refused as error:
                    log.warning("a delivered group cannot be read, its prompt is queued again: %s", error)
                    self._call(calls.Spoiled(version=version, lease_id=lease_id, error=short(str(error))))
                    break
            else:
                return Batch(
                    batch_id=head.batch_id,
                    version=head.version,
                    incarnation=head.incarnation,
                    groups=tuple(groups),
                    ended=head.ended,
                )

    def trained(self, *, batch_id: str, version: int) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Trained(batch_id=batch_id, version=version))

    def durable(self, *, version: int) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Durable(version=version))

    def eval_results(self, *, version: int, count: int, wait_s: float) -> tuple[Group, ...]:
        """See broker.contract.Broker."""
        call = calls.EvalResults(version=version, count=count)
        _, bodies = self._call_for_bodies(call, wait_s=wait_s)
        groups: list[Group] = []
        for body in bodies:
            try:
                group = self._readable(body)
                if (sampled := round_version([group.prompt.item])) != version:
                    raise Refused(f"an answer of the round for version {sampled} where {version} was expected")
                groups.append(group)
            except Refused as error:
                log.warning("an evaluation answer cannot be read and is left out: %s", error)
        return tuple(groups)

    def publish(self, publication: Publication) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Publish(publication=publication))

    def finish(self, reason: str) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Finish(reason=reason))

    # -- generators --------------------------------------------------------------------------------------------
    def lease(
        self, *, member_id: str, policy_version: int, incarnation: int, max_prompts: int, wait_s: float
    ) -> tuple[Lease, ...]:
        """See broker.contract.Broker."""
        call = calls.LeasePrompts(
            member_id=member_id,
            policy_version=policy_version,
            incarnation=incarnation,
            max_prompts=min(max_prompts, PROMPTS_PER_CALL),
            token=self._token(),
        )
        heads, prompts = self._call_for_bodies(call, wait_s=wait_s)
        return tuple(
            Lease(
                lease_id=head.lease_id,
                prompt=decode(prompt, Prompt, max_bytes=self._config.max_frame_bytes),
                attempt=head.attempt,
                incarnation=incarnation,
            )
            for head, prompt in zip(heads, prompts, strict=True)
        )

    def push(self, group: Group) -> PushOutcome:
        """See broker.contract.Broker. Raises Refused for a group whose parts have not grown together."""
        return self.push_all([group])[0]

    def push_all(self, groups: Sequence[Group]) -> tuple[PushOutcome, ...]:
        """See broker.contract.Broker. Raises Refused for groups whose parts have not grown together."""
        for group in groups:
            refuse_malformed(group)
        heads, bodies = (
            [GroupHead.of(group) for group in groups],
            self._sendable("group", [encode(group) for group in groups]),
        )
        outcomes: dict[int, PushOutcome] = {}
        try:
            for part in self._parts(bodies, GROUPS_PER_CALL):
                self._push_part(range(len(groups))[part], heads, bodies, outcomes)
        except (Refused, BufferFull) as error:
            error.settled = outcomes
            raise
        return tuple(outcomes[i] for i in range(len(groups)))

    def _push_part(
        self, part: Sequence[int], heads: Sequence[GroupHead], bodies: Sequence[bytes], outcomes: dict[int, PushOutcome]
    ) -> None:
        """Pushes these until each has its outcome, which it notes. Raises BufferFull."""
        until, pause = time.monotonic() + self._config.push_timeout_s, FIRST_PUSH_PAUSE_S
        while due := [i for i in part if i not in outcomes]:
            answers = self._call(calls.Push(heads=tuple(heads[i] for i in due)), bodies=[bodies[i] for i in due])
            outcomes.update((i, answer) for i, answer in zip(due, answers, strict=True) if answer is not None)
            if not (left := [i for i in due if i not in outcomes]):
                return
            sizes = [len(bodies[i]) for i in left]
            if time.monotonic() >= until:
                raise BufferFull(
                    f"no room for {len(sizes)} groups of {sum(sizes)} bytes within broker.push_timeout_s = "
                    f"{self._config.push_timeout_s:g}: the learner takes too little, or raise broker.max_buffer_bytes"
                )
            ask = calls.WorthPushing(size=min(sizes), lease_ids=tuple(heads[i].lease_id for i in left))
            self._await_room(ask, pause, until)
            pause = min(2 * pause, LAST_PUSH_PAUSE_S)

    def _await_room(self, ask: calls.WorthPushing, pause: float, until: float) -> None:
        """Returns when it is time to push again, or at the deadline; nothing but the question is sent meanwhile."""
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            if self._call(ask):
                return
            pause = min(2 * pause, LAST_PUSH_PAUSE_S)

    def _parts(self, bodies: Sequence[bytes], most: int) -> Iterator[slice]:
        """Neighbours that go into one call: no more than ``most``, nor than ``CALL_BYTES``, unless it is one."""
        start = size = 0
        most_bytes = min(CALL_BYTES, self._config.max_frame_bytes)
        for i, body in enumerate(bodies):
            if i - start == most or (i > start and size + len(body) > most_bytes):
                yield slice(start, i)
                start, size = i, 0
            size += len(body)
        if bodies:
            yield slice(start, len(bodies))

    def release(self, *, lease_id: str, error: str) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Release(lease_id=lease_id, error=short(error)))

    # -- members -----------------------------------------------------------------------------------------------
    def report(self, member: Member) -> None:
        """See broker.contract.Broker."""
        self._call(calls.Report(member=replace(member, error=printable(member.error))))

    def publication(self, *, after_attempt: int, wait_s: float) -> Publication | None:
        """See broker.contract.Broker."""
        return self._call(calls.ReadPublication(after_attempt=after_attempt), wait_s=wait_s)

    # -- weights on their way ----------------------------------------------------------------------------------
    @property
    def max_blob_bytes(self) -> int:
        """See broker.contract.Broker."""
        return self._config.max_blob_bytes

    def put_blob(self, name: str, data: bytes) -> None:
        """See broker.contract.Broker."""
        self._call(
            calls.PutBlob(name=name, max_bytes=self._config.max_blob_bytes), bodies=self._sendable("blob", [data])
        )

    def get_blob(self, name: str) -> bytes | None:
        """See broker.contract.Broker."""
        there, bodies = self._call_for_bodies(calls.GetBlob(name=name))
        return bodies[0] if there else None

    def sweep_blobs(self, keep: Sequence[str]) -> int:
        """See broker.contract.Broker."""
        return self._call(calls.SweepBlobs(keep=tuple(keep)))

    # -- everyone ----------------------------------------------------------------------------------------------
    def dead_items(self) -> tuple[DeadItem, ...]:
        """See broker.contract.Broker."""
        return self._call(calls.ReadDead())

    def requeue(self, items: Sequence[str]) -> int:
        """See broker.contract.Broker."""
        return self._call(calls.Requeue(items=tuple(items)))

    def state(self, *, after_revision: int = -1, wait_s: float = 0.0) -> RunState:
        """See broker.contract.Broker."""
        return self._call(calls.ReadState(after_revision=after_revision), wait_s=wait_s)

    def close(self) -> None:
        """See broker.contract.Broker."""
        self._closed = True

    def _readable(self, body: bytes, lease_id: str | None = None, item: str | None = None) -> Group:
        """The group in a body, if it is one and the one that was promised. Raises Refused."""
        group = decode(body, Group, max_bytes=self._config.max_frame_bytes)
        refuse_malformed(group)
        if lease_id not in (None, group.lease_id):
            raise Refused(f"the group of lease {group.lease_id} where that of {lease_id} was expected")
        if item not in (None, group.prompt.item):
            raise Refused(f"a group for item {group.prompt.item} where one for {item} was expected")
        refuse_misnamed([group.prompt])
        return group
