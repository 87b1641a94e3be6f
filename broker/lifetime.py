"""A process that does not outlive its parent, also when the parent gets SIGKILL.

Linux only, as are the GPUs' hosts: ``prctl(PR_SET_PDEATHSIG)``, see prctl(2). The kernel sends the signal when the
*thread* that started the child ends, so children are started from threads that live as long as their process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets ``with_signal`` when its parent dies. Ends it if ``parent_pid`` is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the call above, of which the kernel tells nobody
        os._exit(128 + with_signal)


def leashed(command: list[str]) -> list[str]:
    """The command line that runs ``command`` so that it gets SIGKILL when the calling process dies."""
    return [sys.executable, "-m", "broker.lifetime", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # the setting survives execve
