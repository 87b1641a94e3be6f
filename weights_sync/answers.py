"""How a receiver that shares no store with the learner answers it: by its report to the broker.

A member that uses the version has taken it. One that could not says so in ``Member.error``, which begins with the
attempt, so that an old error is not taken for the answer to a new attempt, and the same error twice is news.
"""

from __future__ import annotations

import re

from broker.messages import Member

_ANSWER = re.compile(r"\battempt (\d+): ")


def answer(attempt: int, error: str) -> str:
    """The error of an attempt, for the member's report."""
    return f"attempt {attempt}: {error}"


def answered(member: Member) -> int:
    """The attempt that the member's error is of; -1: of none."""
    found = _ANSWER.search(member.error)
    return int(found[1]) if found else -1
