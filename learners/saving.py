"""Checkpoints beside the training: the steps wait for a copy, and a thread of rank 0 writes it.

    begin: draft ─capture─► (copy) ─► thread: files ─► fsync ─► rename ─► marker ─► done: the broker is told

One checkpoint is being written at a time: ``begin`` follows a ``wait`` that has found the last one complete. A process
that is killed meanwhile leaves a draft without a marker, and the checkpoint before is the newest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path

from broker.messages import Frontier
from learners.checkpoint import Checkpoints

Capture = Callable[[Path], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    version: int
    frontier: Frontier


class Saver:
    """Every rank calls ``begin``; only rank 0 has something to wait for."""

    def __init__(self, checkpoints: Checkpoints, *, rank: int = 0, barrier: Callable[[], None] = lambda: None) -> None:
        self._checkpoints, self._rank, self._barrier = checkpoints, rank, barrier
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    def begin(self, version: int, frontier: Frontier, capture: Capture) -> None:
        """Collective. Returns when ``capture`` has; what that returns is written by the thread."""
        assert self._writing is None, "the checkpoint before is still being written"
        write = capture(self._checkpoints.draft(version))
        self._barrier()
        if self._rank == 0:
            self._writing = self._writer.submit(self._write, write, Saved(version=version, frontier=frontier))

    def wait(self, wait_s: float) -> Saved | None:
        """The checkpoint that has become complete, once; None after ``wait_s`` or when none is being written.

        Raises what has stopped the writing.
        """
        if self._writing is None:
            return None
        try:
            saved = self._writing.result(timeout=wait_s)
        except NotYet:
            if self._writing.done():  # the writing's own
                raise
            return None
        self._writing = None
        return saved

    @property
    def idle(self) -> bool:
        """Whether nothing is being written."""
        return self._writing is None

    def close(self) -> None:
        """Waits for the writing, whatever comes of it."""
        self._writer.shutdown(wait=True)

    def _write(self, write: Callable[[], None], saved: Saved) -> Saved:
        write()
        self._checkpoints.complete(saved.version, saved.frontier)
        return saved
