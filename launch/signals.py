"""What SIGINT, SIGTERM and SIGHUP mean to every process of a run: tear down, and be gone by a deadline.

Python runs its handlers on the main thread, between two bytecodes: a main thread that sits in a collective or in a
poll runs none, and a signal just before the poll is not seen by it. So a thread of ours waits on the descriptor to
which the interpreter writes each signal's number, and acts.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks this process to end. Not an Exception: nothing that retries or counts failures may catch it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def exit_at_once(signum: int) -> None:
    """For a process with nothing to close: one that still imports, or is as good after SIGKILL."""
    sys.stderr.flush()
    os._exit(128 + signum)


class SignalWatch:
    """Calls ``act(signum)`` at the first signal, from a thread of its own; ``timeout_s`` later the process is killed.

    ``act`` may be replaced as the process gets further; ``signum`` is 0 until the signal. Later signals do nothing.
    A signal that is ignored already (``nohup``) stays ignored.
    """

    def __init__(self, timeout_s: float, act: Callable[[int], None] = exit_at_once) -> None:
        self.act = act
        self.signum = 0
        self._timeout_s = timeout_s
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for each in HANDLED:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, lambda *_: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _watch(self) -> None:
        """Waits for a signal, then for the deadline; both end the wait."""
        while (signum := self._reader.recv(1)[0]) not in HANDLED:
            continue
        deadline = threading.Timer(self._timeout_s, _end, args=(signum,))
        deadline.daemon = True
        deadline.start()
        self.signum = signum
        self.act(signum)


def _end(signum: int) -> None:
    """Only a leader of its process group takes the group along: another one's group is not ours to kill."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signum)
