"""Texts of other processes, as a terminal may show them."""

from __future__ import annotations


def plain(text: str) -> str:
    """The text with control characters, newlines too, and lone surrogates written out: ``\\x1b``, ``\\n``, ``\\udc00``.

    Errors and names come from whoever joined the run: a terminal must not obey them, nor UTF-8 fail on them.
    """
    return "".join(one if one.isprintable() or one == "\t" else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
