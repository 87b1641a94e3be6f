"""What the ledger reads of prompts and groups. Their bodies (encoded messages) pass through the broker unread."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from broker.errors import Refused
from broker.messages import EndedItem, Group, Prompt, Split

_TRAIN_ITEM = re.compile(r"0|[1-9]\d{0,12}", re.ASCII)
_EVAL_ITEM = re.compile(r"eval(\d{1,13})\.(\d{1,13})", re.ASCII)
_EVAL = "eval"


@dataclass(frozen=True, kw_only=True)
class LeaseHead:
    """A lease without its prompt."""

    lease_id: str
    item: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class GroupHead:
    """A group without its completions. ``tokens``: (policy version, tokens sampled by it that carry loss) pairs."""

    lease_id: str
    item: str
    incarnation: int
    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, group: Group) -> GroupHead:
        """The head that travels with this group."""
        tokens = tuple(sorted(group.tokens_per_version().items()))
        return cls(lease_id=group.lease_id, item=group.prompt.item, incarnation=group.incarnation, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class BatchHead:
    """A batch without its groups, whose items are named in order."""

    batch_id: str
    version: int
    incarnation: int
    items: tuple[str, ...]
    lease_ids: tuple[str, ...]
    ended: tuple[EndedItem, ...]


def is_eval(item: str) -> bool:
    """Whether this is the name of an evaluation item."""
    return item.startswith(_EVAL)


def position_of(item: str) -> int:
    """The place in the feed (evaluation: in the set) that an item is named by."""
    return int(item.rpartition(".")[2])


def refuse_misnamed(prompts: Iterable[Prompt]) -> None:
    """Raises Refused unless training items are named ``<position>`` and evaluation items ``eval<version>.<position>``.

    The ledger and the frontier rely on it: an item's name is its place in the feed.
    """
    for prompt in prompts:
        wanted = _EVAL_ITEM if prompt.split is Split.EVAL else _TRAIN_ITEM
        if not wanted.fullmatch(prompt.item) or position_of(prompt.item) != prompt.position:
            raise Refused(f"{prompt.split} item {prompt.item!r} is not named by its position {prompt.position}")


def refuse_misnamed_items(items: Iterable[str]) -> None:
    """As ``refuse_misnamed``, for a ledger that sees the names only."""
    for item in items:
        if not (_EVAL_ITEM if is_eval(item) else _TRAIN_ITEM).fullmatch(item):
            raise Refused(f"item {item!r} is not named by its position in the feed")


def refuse_misfit(head: GroupHead) -> None:
    """Raises Refused for token counts that no group can have."""
    for pair in head.tokens:
        if len(pair) != 2 or pair[1] <= 0:
            raise Refused(f"item {head.item}: {pair} is not (policy version, tokens)")


def round_version(items: Iterable[str]) -> int:
    """The one policy version that these evaluation items belong to, from their names. Raises Refused."""
    names = list(items)
    matches = [_EVAL_ITEM.fullmatch(item) for item in names]
    versions = {int(match[1]) for match in matches if match}
    if len(versions) != 1 or not all(matches):
        raise Refused(f"evaluation items must be named eval<version>.<i>, one version a call: {names[0]!r}, …")
    return versions.pop()
