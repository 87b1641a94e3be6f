"""The broker's folder on disk (``broker.data_dir``): for its owner's eyes, and open in one broker at a time."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

IN_USE = "another broker has it open: stop it or set another broker.data_dir"
LOCK = ".lock"
PATIENCE_S = 5.0  # what a broker that was killed a moment ago may take to be gone with all its children
_LOOK_S = 0.1


def make_private(folder: Path) -> None:
    """Makes the folder, which will hold prompts and groups. One that is there keeps the mode it has."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def hold(folder: Path) -> int:
    """Waits up to ``PATIENCE_S`` for the folder's lock and returns the descriptor that holds it.

    The kernel gives the lock up with the last process that has the descriptor, however that ends. Raises
    BlockingIOError when another broker has the folder, OSError when it cannot be used.
    """
    make_private(folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_LOOK_S)  # a flock that blocks has no deadline
    except BaseException:
        os.close(lock)
        raise
