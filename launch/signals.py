"""What SIGINT, SIGTERM and SIGHUP mean to every process of a run: tear down, and be gone by a deadline.

Python runs handlers on the main thread, between two bytecodes. A thread blocked in a collective runs none, so a
guard of its own, woken through the signal's file descriptor, ends the process group when the deadline passes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks this process to end. Not an Exception: nothing that retries or counts failures may catch it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def on_stop(act: Callable[[int], None]) -> None:
    """Calls ``act(signum)`` on the main thread at the first signal; later ones do nothing, the guard is armed.

    A signal that is ignored already (``nohup``) stays ignored.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        for each in HANDLED:
            signal.signal(each, lambda *_: None)
        act(signum)

    for signum in HANDLED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handle)


def raise_stopped(signum: int) -> None:
    """For ``on_stop`` in plain synchronous code: the main thread unwinds."""
    raise Stopped(signum)


def guard(timeout_s: float) -> None:
    """Gives this process ``timeout_s`` from the first signal on; then it and its process group get SIGKILL.

    Only a leader of its process group takes the group along: another one's group is not ours to kill.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, writer, timeout_s), name="signal-guard", daemon=True).start()


def _watch(reader: socket.socket, writer: socket.socket, timeout_s: float) -> None:
    """Waits for a signal's number on ``reader``; holds ``writer``, which the interpreter knows only as a number."""
    with reader, writer:
        while (signum := reader.recv(1)) and signum[0] not in HANDLED:
            continue
        deadline = threading.Timer(timeout_s, _end, args=(signum[0],))
        deadline.daemon = True
        deadline.start()
        deadline.join()


def _end(signum: int) -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signum)
