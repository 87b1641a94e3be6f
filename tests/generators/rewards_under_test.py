"""Reward functions that behave as badly as people's do."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading

FOREVER = threading.Event()


def one(text: str, answer: str, reference: str) -> float:
    return 1.0


def half(text: str, answer: str, reference: str) -> float:
    return 0.5


def arguments(text: str, answer: str, reference: str) -> float:
    return float((text, answer, reference) == ("2+2=", "4", "four"))


async def later(text: str, answer: str, reference: str) -> float:
    await asyncio.sleep(0.2)
    return 1.0


async def slow(text: str, answer: str, reference: str) -> float:
    await asyncio.sleep(1.5)
    return 1.0


def coroutine_in_disguise(text: str, answer: str, reference: str) -> object:
    return later(text, answer, reference)


def alarm(text: str, answer: str, reference: str) -> float:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0


def hangs_on_bad(text: str, answer: str, reference: str) -> float:
    if answer == "bad":
        FOREVER.wait(30.0)
    return 1.0


def fails_on_bad(text: str, answer: str, reference: str) -> float:
    if answer.startswith("bad"):
        raise StopIteration("no idea")
    return 1.0


def infinite(text: str, answer: str, reference: str) -> float:
    return float("inf")


def nothing(text: str, answer: str, reference: str) -> None:
    return None


def divides(text: str, answer: str, reference: str) -> float:
    return 1 / len("")


async def divides_later(text: str, answer: str, reference: str) -> float:
    return 1 / len("")


def exits(text: str, answer: str, reference: str) -> float:
    sys.exit("done")


def interrupts(text: str, answer: str, reference: str) -> float:
    raise KeyboardInterrupt


def cancels(text: str, answer: str, reference: str) -> float:
    raise asyncio.CancelledError


async def exits_later(text: str, answer: str, reference: str) -> float:
    sys.exit("done")


async def interrupts_later(text: str, answer: str, reference: str) -> float:
    raise KeyboardInterrupt


async def cancels_later(text: str, answer: str, reference: str) -> float:
    raise asyncio.CancelledError


def exits_in_disguise(text: str, answer: str, reference: str) -> object:
    return exits_later(text, answer, reference)
