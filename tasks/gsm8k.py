"""Grade-school mathematics (GSM8K, arXiv 2110.14168): word problems whose answer is one integer.

The files are JSON Lines as published: ``question`` and ``answer``, whose last line is ``#### <number>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tasks.loading import TaskError
from tasks.prompts import Item

Option = str | int | float | bool

INSTRUCTION = "\nReason step by step, and end with a line: #### followed by the number."
_NUMBER = r"(?:(?<![\w.)])[-+])?\$?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"  # in "10-3" the minus is no sign
_LAST_NUMBER = re.compile(_NUMBER)
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ENDS_ON_NUMBER = re.compile(rf"(?:{_NUMBER})\s*\.?\s*$")


def prompts(split: str, seed: int, options: Mapping[str, Option]) -> list[Item]:
    """The training set, or the test set for evaluation.

    Options: ``path``, the directory of train.jsonl and test.jsonl; ``instruction``, put after each question.
    """
    instruction = str(options.get("instruction", INSTRUCTION))
    rows = read_jsonl(_file(options, "test.jsonl" if split == "eval" else "train.jsonl"))
    return [Item(text=row["question"] + instruction, reference=row["answer"]) for row in rows]


def _file(options: Mapping[str, Option], name: str) -> Path:
    path = str(options.get("path", ""))
    if not path:
        raise TaskError("task.options.path: not set; give the directory that holds GSM8K's train.jsonl and test.jsonl")
    file = Path(path).expanduser() / name
    if not file.is_file():
        raise TaskError(f"task.options.path: there is no {name} in {file.parent.resolve()}")
    return file


def read_jsonl(file: Path) -> list[dict[str, str]]:
    """The rows of a JSON Lines file, whose lines end with ``\\n`` and with nothing else.

    ``str.splitlines`` would also cut at U+2028, U+2029 and U+0085, which are legal inside JSON texts.
    """
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append({"question": str(row["question"]), "answer": str(row["answer"])})
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"task.options.path: {file}, line {number}: {error!r}") from error
    return rows


def number_in(text: str) -> str | None:
    """The number that ``text`` ends on: after the last ``####``, else the last one; canonical, None if there is none.

    ``"1,234.0"`` and ``"$1234"`` are both ``"1234"``.
    """
    marked = _MARKED.findall(text)
    found = marked[-1:] or _LAST_NUMBER.findall(text)[-1:]
    return _canonical(found[0]) if found else None


def _canonical(number: str) -> str:
    """Digits only, without signs of currency, grouping, or a fraction of zeros; no float, so no digit is lost."""
    sign = "-" if number.startswith("-") else ""
    whole, _, fraction = number.lstrip("+-").replace("$", "").replace(",", "").strip().partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def reward(text: str, answer: str, reference: str) -> float:
    """1 where the number that the answer ends on is the reference's, else 0."""
    given = number_in(answer)
    return float(given is not None and given == number_in(reference))


def format_reward(text: str, answer: str, reference: str) -> float:
    """1 where the answer names its result behind ``####`` exactly once."""
    return float(len(_MARKED.findall(answer)) == 1 and answer.count("####") == 1)


def ending_reward(text: str, answer: str, reference: str) -> float:
    """1 where the answer comes to its end on a number: it was neither cut off in the middle nor left without one."""
    return float(_ENDS_ON_NUMBER.search(answer) is not None)
