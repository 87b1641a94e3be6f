"""The generator's loop: a prompt's way from lease to pushed group, while policy versions come in.

    publication ─► stage ─► swap ─► report                        (follow: one at a time, sampling goes on)
    lease ─► generators.rollout ─► Group ─► push                  (one task a group, groups_in_flight of them)

The loops share one ``_Generator``; whoever changes it calls ``_wake``, which ends every wait in ``_until``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from broker.config import BrokerConfig
from broker.contract import Broker, PushOutcome
from broker.errors import RunFinished, SlipstreamError
from broker.messages import Lease, Member, MemberState, Publication, Split
from generators.broker_thread import BrokerThread
from generators.config import GeneratorConfig
from generators.deliveries import Deliveries
from generators.engine import Engine, EngineDead, NonFiniteLogits
from generators.groups import Decode
from generators.rates import Rates
from generators.rollout import Rollout
from generators.running import Running
from generators.scoring import RewardsStuck, Scorer
from weights_sync.errors import SyncFailed

log = logging.getLogger(__name__)

LEASE_WAIT_S = 0.5  # one long poll for prompts; how long a poll under a replaced version can linger
FOLLOW_WAIT_S = 5.0  # one long poll for publications
LEAVE_S = 3.0  # for telling the broker that we leave; as much again for the engine to close
POLLERS = 2  # a second one asks under the new version while the first still asks under the old
FATAL = (EngineDead, NonFiniteLogits, MemoryError, RewardsStuck)  # of the process, not of one group


class TooManyFailures(SlipstreamError):
    """``generator.max_failed_groups`` groups in a row have failed: it is not the prompts."""


async def generate(
    *,
    broker: Callable[[], Broker],
    engine: Engine,
    score: Scorer,
    decode: Decode,
    config: GeneratorConfig,
    broker_config: BrokerConfig,
    group_timeout_s: float,
    member_id: str,
    stop: asyncio.Event,
    drain: bool = False,
    grace_s: float = 10.0,
) -> None:
    """Serves until the run finishes or ``stop`` is set; either is a clean return.

    Args:
        broker: opens a client for one thread; called for a few of them.
        drain: a swap waits for all answers under way, and not only for evaluation's (``weights_sync.on_update``).
        grace_s: how long they may hold it up; those not done then are given back (``weights_sync.drain_timeout_s``).

    Raises what makes this generator useless: EngineDead, NonFiniteLogits, MemoryError, RewardsStuck, TooManyFailures,
    BrokerUnreachable. It has left the run by then: its leases are back and its last report says why.
    """
    rollout = Rollout(
        engine=engine,
        scorer=score,
        decode=decode,
        timeout_s=group_timeout_s,
        generator=member_id,
        delay_s=config.delay_s,
    )
    generator = _Generator(
        broker=broker,
        engine=engine,
        rollout=rollout,
        config=config,
        broker_config=broker_config,
        member_id=member_id,
        drain=drain,
        grace_s=grace_s,
    )
    error = ""
    try:
        await generator.serve(stop)
    except RunFinished as finish:
        log.info("the run has finished: %s", finish)
    except Exception as fatal:  # told to the others, then raised: teardown
        error = f"{type(fatal).__name__}: {fatal}"
        raise
    finally:
        await generator.leave(error)


class _Generator:
    """What the loops share. All of it lives on one event loop."""

    def __init__(
        self,
        *,
        broker: Callable[[], Broker],
        engine: Engine,
        rollout: Rollout,
        config: GeneratorConfig,
        broker_config: BrokerConfig,
        member_id: str,
        drain: bool,
        grace_s: float,
    ) -> None:
        self._engine, self._rollout, self._config, self._broker_config = engine, rollout, config, broker_config
        self._member_id, self._drain, self._grace_s = member_id, drain, grace_s
        self._reports, self._publications, deliveries = (
            BrokerThread(broker, f"broker-{name}") for name in ("reports", "publications", "deliveries")
        )
        self._deliveries = Deliveries(deliveries, self._reports)
        self._polls = [BrokerThread(broker, f"broker-leases-{i}") for i in range(POLLERS)]
        self._changed = asyncio.Event()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state = MemberState.STARTING
        self._leaving = False
        self._incarnation = -1  # of the version in use
        self._error = ""
        self._life = uuid.uuid4().hex
        self._run_seen_open = False
        self._groups = Running(self._wake)
        self._polling: set[tuple[int, int]] = set()
        self._pollers: list[asyncio.Task[None]] = []
        self._failed_in_a_row = 0
        self._rates = Rates()

    # -- life --------------------------------------------------------------------------------------------------
    async def serve(self, stop: asyncio.Event) -> None:
        """Runs the loops until one of them raises or ``stop`` is set; all but the lease polls are ended by then."""
        self._pollers = [asyncio.create_task(self._lease(poll)) for poll in self._polls]
        beat, follow, stopped = (asyncio.create_task(part) for part in (self._beat(), self._follow(), _set(stop)))
        try:
            parts = (self._fatal, *self._pollers, beat, follow, stopped)
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
            await _cancel(follow)
            await self._finish_groups()
        finally:
            self._leaving = True
            await _cancel(beat, follow, stopped)

    async def _finish_groups(self) -> None:
        """Told to leave: takes no new prompt, but what runs may end, up to ``generator.leave_grace_s``."""
        self._leaving = True
        self._become(MemberState.DRAINING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.leave_grace_s):
                await self._until(lambda: not self._groups)

    async def leave(self, error: str) -> None:
        """Gives every lease back, reports GONE and closes; each part best effort, before a deadline they share.

        The polls end by themselves first: what they were about to be given would else wait for its lease to expire.
        """
        deadline = asyncio.get_running_loop().time() + LEAVE_S
        await _best_effort("end the lease polls", deadline, asyncio.gather(*self._pollers, return_exceptions=True))
        await _best_effort("give the leases back", deadline, self._abandon(self._groups.leases()))
        await _best_effort("report leaving", deadline, self._report(MemberState.GONE, error))
        await _best_effort("close the engine", deadline + LEAVE_S, self._engine.close())
        self._deliveries.close()
        for thread in (self._reports, self._publications, *self._polls):
            thread.close()

    def _become(self, state: MemberState) -> None:
        self._state = state
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for ``condition``; woken by every change of the shared state."""
        while not condition():
            await self._changed.wait()

    # -- members -----------------------------------------------------------------------------------------------
    async def _beat(self) -> None:
        """Reports every ``broker.heartbeat_s``, and at once when state, version or error have changed."""
        while True:
            shown = self._shown()
            await self._report(self._state, self._error)
            try:
                async with asyncio.timeout(self._broker_config.heartbeat_s):
                    await self._until(lambda shown=shown: self._shown() != shown)  # type: ignore[misc]
            except TimeoutError:
                continue

    def _shown(self) -> tuple[object, ...]:
        return self._state, *self._terms(), self._error

    def _terms(self) -> tuple[int, int]:
        return self._engine.policy_version, self._incarnation

    async def _report(self, state: MemberState, error: str) -> None:
        member = Member(
            member_id=self._member_id,
            role="generator",
            state=state,
            policy_version=self._engine.policy_version,
            incarnation=self._incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            leases=self._groups.leases(),
            stats={
                **self._rates.stats(),
                "groups_in_flight": float(len(self._groups)),
                "swap_stall_s": self._engine.swap_stall_s,
            },
            error=error,
            life=self._life,
        )
        await self._reports.call(lambda broker: broker.report(member))

    # -- policy versions ---------------------------------------------------------------------------------------
    async def _follow(self) -> None:
        """Loads the model, then takes every version that is offered to this member; woken by a publication."""
        await self._engine.start()
        self._become(MemberState.SYNCING)
        began, known = time.monotonic(), -1
        while True:
            publication = await self._next_publication(known)
            if publication is None:
                await self._check_finished(began)
                continue
            known, self._run_seen_open = publication.attempt, True
            if 0 <= self._incarnation != publication.incarnation:
                self._become(MemberState.SYNCING)  # no lease until a version of the new incarnation is in use
                await self._abandon(self._groups.leases())
            if self._member_id in publication.receivers:
                await self._take(publication)

    async def _next_publication(self, known: int) -> Publication | None:
        """The newest publication unless it is ``known``; a broker that lost its memory numbers them from 0 again."""
        newest = await self._publications.call(
            lambda broker: broker.publication(after_attempt=known, wait_s=FOLLOW_WAIT_S)
        )
        if newest is None and known >= 0:
            current = (await self._publications.call(lambda broker: broker.state())).publication
            newest = current if current is not None and current.attempt < known else None
        return newest

    async def _check_finished(self, began: float) -> None:
        """Raises RunFinished, if need be after a while: the broker may still remember the run before this one."""
        state = await self._publications.call(lambda broker: broker.state())
        self._run_seen_open |= not state.finished and state.rules is not None
        if state.finished:
            if self._run_seen_open or time.monotonic() - began > self._broker_config.reconnect_timeout_s:
                raise RunFinished(state.finished)
            await self._publications.call(
                lambda broker: broker.state(after_revision=state.revision, wait_s=FOLLOW_WAIT_S)
            )

    async def _take(self, publication: Publication) -> None:
        """Stages and swaps; after a failure the old version goes on serving and the error is reported."""
        before = self._state
        try:
            await self._engine.stage(publication, member_id=self._member_id)
            if self._drain:
                self._become(MemberState.SYNCING)  # no new request from here to the swap
            await self._end_of_one_version()
            await self._engine.swap(publication)
        except SyncFailed as error:
            log.warning("version %d, attempt %d: %s", publication.version, publication.attempt, error)
            self._error = f"{type(error).__name__}: {error}"
            self._become(before)
            return
        self._incarnation, self._error = publication.incarnation, ""
        self._become(MemberState.SERVING)
        log.info("policy version %d of incarnation %d is in use", publication.version, publication.incarnation)

    async def _end_of_one_version(self) -> None:
        """Lets answers under way end that are to have one version, up to ``grace_s``; late ones are given back."""
        try:
            async with asyncio.timeout(self._grace_s):
                await self._until(lambda: not self._of_one_version())
        except TimeoutError:
            await self._abandon(self._of_one_version())

    def _of_one_version(self) -> list[str]:
        return self._groups.sampling(lambda lease: self._drain or lease.prompt.split is Split.EVAL)

    # -- leases ------------------------------------------------------------------------------------------------
    def _free(self) -> int:
        return self._config.groups_in_flight - len(self._groups)

    def _may_poll(self) -> bool:
        return self._state is MemberState.SERVING and self._free() > 0 and self._terms() not in self._polling

    async def _lease(self, poll: BrokerThread) -> None:
        """Turns leases into group tasks; waits for a free slot under a version nobody asks for, then for prompts."""
        while True:
            await self._until(lambda: self._leaving or self._may_poll())
            if self._leaving:
                return
            terms = self._terms()
            self._polling.add(terms)
            try:
                leases = await self._poll(poll, terms, self._free())
            finally:
                self._polling.discard(terms)
                self._wake()
            for lease in leases:
                await self._begin(lease, terms)

    async def _poll(self, poll: BrokerThread, terms: tuple[int, int], wanted: int) -> tuple[Lease, ...]:
        return await poll.call(
            lambda broker: broker.lease(
                member_id=self._member_id,
                policy_version=terms[0],
                incarnation=terms[1],
                max_prompts=wanted,
                wait_s=LEASE_WAIT_S,
            )
        )

    async def _begin(self, lease: Lease, terms: tuple[int, int]) -> None:
        """Starts the group, unless what was asked for has changed while the broker answered."""
        whole = lease.prompt.split is Split.TRAIN or terms == self._terms()
        if self._state is MemberState.SERVING and lease.incarnation == self._incarnation and whole and self._free() > 0:
            task = asyncio.create_task(self._group(lease, terms[0]))
            self._groups.add(lease, task)
            task.add_done_callback(lambda done: self._ended(lease, done))
        else:
            await self._release(lease, "")

    def _ended(self, lease: Lease, task: asyncio.Task[None]) -> None:
        self._groups.ended(lease.lease_id)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._fatal.done() and not self._leaving:
            self._fatal.set_exception(error)

    async def _release(self, lease: Lease, error: str) -> None:
        await self._deliveries.release(lease_id=lease.lease_id, error=error)

    async def _abandon(self, lease_ids: Sequence[str]) -> None:
        """Ends these groups and gives their leases back, as if they had not been tried."""
        for lease in await self._groups.cancel(lease_ids):
            await self._release(lease, "")

    async def _group(self, lease: Lease, version: int) -> None:
        """From lease to pushed group. A group that fails gives its lease back; the others go on."""
        try:
            group = await self._rollout.answer(lease, on_sampled=lambda: self._groups.sampled(lease.lease_id))
        except FATAL:
            raise
        except Exception as error:  # one rollout fails and is counted
            await self._failed(lease, error)
            return
        if lease.prompt.split is Split.EVAL and group.tokens_per_version().keys() - {version}:
            await self._release(lease, "")  # an evaluation is of one version: this one began in the middle of a swap
            return
        outcome = await self._deliveries.push(group)
        self._failed_in_a_row = 0
        self._rates.pushed(group, accepted=outcome is PushOutcome.ACCEPTED)

    async def _failed(self, lease: Lease, error: Exception) -> None:
        self._rates.group_failed()
        self._failed_in_a_row += 1
        reason = f"{type(error).__name__}: {error}"
        log.warning("item %s, attempt %d: %s", lease.prompt.item, lease.attempt, reason)
        await self._release(lease, reason)
        if self._failed_in_a_row >= self._config.max_failed_groups:
            raise TooManyFailures(
                f"{self._failed_in_a_row} groups in a row have failed (generator.max_failed_groups); the last: {reason}"
            )


async def _set(stop: asyncio.Event) -> None:
    await stop.wait()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _best_effort(what: str, deadline: float, part: Awaitable[Any]) -> None:
    """Teardown: an error or the deadline of one part must not keep the others from happening."""
    try:
        async with asyncio.timeout_at(deadline):
            await part
    except Exception as error:  # teardown
        log.warning("could not %s: %s: %s", what, type(error).__name__, error)
