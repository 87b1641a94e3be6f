"""Reasons as keys of the books: short, and few enough that a long run cannot grow them without bound."""

from __future__ import annotations

REASON_CHARACTERS = 200
ERROR_CHARACTERS = 2000  # of a member, which is replaced by its next report
DISTINCT_REASONS = 32
OTHER = "other"


def short(text: str) -> str:
    """The first line of an error, cut to ``REASON_CHARACTERS``; what cannot be printed is escaped, as in ``\\x1b``."""
    return printable(text.strip().partition("\n")[0], REASON_CHARACTERS)


def printable(text: str, most: int = ERROR_CHARACTERS) -> str:
    """At most ``most`` characters of a text, with all but line ends escaped that cannot be printed."""
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def tally(counts: dict[str, int], reason: str) -> str:
    """Counts a reason, as ``other`` once there are ``DISTINCT_REASONS``, and returns the name it was counted under."""
    name = reason if reason in counts or len(counts) < DISTINCT_REASONS else OTHER
    counts[name] = counts.get(name, 0) + 1
    return name


def untally(counts: dict[str, int], name: str) -> None:
    """Takes back what ``tally`` counted under this name."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
