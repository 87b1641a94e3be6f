"""Validation passes: held-out prompts answered by one policy version, while the learner stands at it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from broker.contract import Broker
from broker.messages import Group, Prompt
from learners.config import EvalConfig
from learners.report import evaluation_line
from telemetry.sink import JsonlSink
from weights_sync.errors import SyncFailed

log = logging.getLogger(__name__)

_SLICE_S = 0.5


class Evaluation:
    """Runs a pass in a thread with its own broker client; the loop polls it, so that the other ranks hear of it.

    Args:
        prompts: the round of a version.
        flush: waits until the newest offered version is in use, or raises SyncFailed.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Broker],
        prompts: Callable[[int], Sequence[Prompt]],
        flush: Callable[[], None],
        sink: JsonlSink,
        config: EvalConfig,
    ) -> None:
        self._connect, self._prompts, self._flush = connect, prompts, flush
        self._sink, self._config = sink, config
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, version: int) -> Callable[[float], bytes | None]:
        """Starts the pass at ``version``; returns what to poll with ``wait_s``: bytes when it is over, else None."""
        future: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(version, future), name="evaluation", daemon=True)
        self._thread.start()

        def poll(wait_s: float) -> bytes | None:
            try:
                future.result(wait_s)
            except TimeoutError:
                if future.done():  # its own, not ours
                    raise
                return None
            return b"over"

        return poll

    def close(self) -> None:
        """Ends a pass under way; one that still waits for the publisher is left behind."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _SLICE_S)

    def _run(self, version: int, future: Future[None]) -> None:
        try:
            self._pass(version)
        except BaseException as error:  # raised again where the loop polls
            future.set_exception(error)
        else:
            future.set_result(None)

    def _pass(self, version: int) -> None:
        try:
            self._flush()
        except SyncFailed as error:  # whoever has the version can answer; who never gets it is the publisher's matter
            log.warning("evaluation at version %d starts without everyone: %s", version, error)
        prompts = self._prompts(version)
        broker = self._connect()
        try:
            broker.feed(prompts)
            groups = self._answers(broker, version, len(prompts))
        finally:
            broker.close()
        line = evaluation_line(groups, version=version, count=len(prompts))
        if line["missing"]:
            log.warning(
                "evaluation at version %d: %s of %d answers missing after learner.eval.timeout_s = %g s",
                version, line["missing"], len(prompts), self._config.timeout_s,
            )  # fmt: skip
        self._sink.write(line)
        log.info("evaluation at version %d: reward %.4f over %d prompts", version, line["reward_mean"], len(prompts))

    def _answers(self, broker: Broker, version: int, count: int) -> Sequence[Group]:
        deadline = time.monotonic() + self._config.timeout_s
        groups: Sequence[Group] = ()
        while len(groups) < count and (left := deadline - time.monotonic()) > 0 and not self._closing.is_set():
            groups = broker.eval_results(version=version, count=count, wait_s=min(left, _SLICE_S))
        return groups
