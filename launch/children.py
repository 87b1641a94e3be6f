"""Child processes: started, waited for without polling, and stopped with everything they started."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from launch.signals import HANDLED, Stopped


@dataclass(frozen=True, kw_only=True)
class Child:
    """A running process. ``leads`` when it leads a process group of its own, which ends with it."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    leads: bool
    log: Path | None

    @property
    def exit_code(self) -> int:
        """As a shell says it: 128 + signal for a killed process."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def signal(self, signum: signal.Signals) -> None:
        """Signals the process itself; its own children are its business."""
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def sweep(self) -> None:
        """SIGKILL to it and to what is left of its group, also after its own end (an engine outlives kill -9)."""
        if self.leads:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self.process.poll() is None:
            self.process.kill()


class Children:
    """The children of this process. Leaving the context stops them all; SIGINT, SIGTERM and SIGHUP end any wait.

    Belongs to the main thread: children die with the thread that started them (broker/lifetime.py).
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._running: list[Child] = []
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def __enter__(self) -> Children:
        # Handlers only note the signal: one that raised could strike between a fork and its entry in the list.
        self._old_fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._old = {each: signal.getsignal(each) for each in HANDLED}
        for each, handler in self._old.items():
            if handler is not signal.SIG_IGN:
                signal.signal(each, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for each, handler in self._old.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None = None,
        own_group: bool = True,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Starts a child; its output goes to the end of ``log``, or where ours goes."""
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("ab")) if log else None
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env=dict(env),
                start_new_session=own_group,
                pass_fds=pass_fds,
            )
        child = Child(name=name, process=process, pidfd=os.pidfd_open(process.pid), leads=own_group, log=log)
        self._running.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return child

    def wait(self, timeout_s: float, *, until: socket.socket | int | None = None) -> Child | None:
        """The next child that has ended (and its group with it), or None after ``timeout_s`` or a wake.

        With ``until``, also returns None when that descriptor can be read. Raises Stopped after a signal.
        """
        if until is not None:
            self._selector.register(until, selectors.EVENT_READ, None)
        try:
            events = self._selector.select(max(0.0, timeout_s))
        finally:
            if until is not None:
                self._selector.unregister(until)
        self._drain()
        if self._signals:
            raise Stopped(self._signals[0])
        ended = [key.data for key, _ in events if isinstance(key.data, Child)]
        if not ended:
            return None
        self._forget(ended[0])
        return ended[0]

    def wake(self) -> None:
        """Ends a wait from another thread."""
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def running(self, *prefixes: str) -> list[Child]:
        """Children that have not ended, as far as ``wait`` has told; all, or those named so."""
        return [child for child in self._running if child.name.startswith(prefixes or "")]

    def stop(self, *prefixes: str, timeout_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL to whole groups at the deadline, or at once when a second signal arrives."""
        patience = self._stop_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + patience
        for child in self.running(*prefixes):
            child.signal(signal.SIGTERM)
        while (left := self.running(*prefixes)) and len(self._signals) < 2 and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if isinstance(key.data, Child):
                    self._forget(key.data)
            self._drain()
        for child in left:
            child.sweep()
            self._forget(child)

    def _forget(self, child: Child) -> None:
        child.sweep()  # before the reaping: until then nobody else can get its group's number
        with contextlib.suppress(subprocess.TimeoutExpired):  # uninterruptible sleep; the kernel ends it later
            child.process.wait(timeout=2.0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._running.remove(child)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                continue
