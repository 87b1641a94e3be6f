"""From a task's items to prompts: tokenising, length filter, and the order of the endless feed.

    items ─tokenise─► length filter ─► one seeded permutation per epoch ─► Prompt at position 0, 1, 2, …

A position always means the same item and the same seed, whoever asks and whenever, so a resumed run needs nothing but
its frontier. P: prompt tokens. N: usable items.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from broker.config import RolloutConfig
from broker.messages import Frontier, Int32Array, Prompt, Split
from tasks.config import TaskConfig
from tasks.loading import TaskError, described, load_function

log = logging.getLogger(__name__)

_SHOWN = 20  # unknown characters in an error
_SMALL_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Item:
    """One entry of a prompt set.

    Attributes:
        text: the prompt, or the user's message where ``task.chat_template`` is set.
        reference: handed to the reward function as it is.
    """

    text: str
    reference: str


def load_items(task: TaskConfig, split: Split, seed: int) -> Sequence[Item]:
    """The items of a split.

    Raises TaskError for a function that is not there, raises, or gives something else, naming the item and the field.
    """
    try:
        items = load_function(task.prompts, setting="task.prompts")(str(split), seed, task.options)
    except TaskError:
        raise
    except Exception as error:  # theirs, whatever it is; the run cannot do without it
        raise TaskError(f"task.prompts={task.prompts}: {described(error, caller=__file__)}") from error
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TaskError(
            f"task.prompts: {task.prompts} returned {type(items).__name__}, where a list of Item is expected"
        )
    for index, item in enumerate(items):
        if not isinstance(item, Item):
            raise TaskError(
                f"task.prompts: item {index} of {task.prompts} ({split}) is {type(item).__name__}, "
                "where tasks.prompts.Item is expected"
            )
        for name in ("text", "reference"):
            if wrong := _no_text(getattr(item, name)):
                raise TaskError(f"task.prompts: {name} of item {index} of {task.prompts} ({split}) {wrong}")
    return items


@dataclass
class LeftOut:
    """Why items of a split are not used.

    Attributes:
        unknown: with characters that the tokenizer does not know; ``characters`` are these.
        long: over ``rollout.max_prompt_length``; ``shortest`` of them, in tokens.
    """

    empty: int = 0
    unknown: int = 0
    characters: set[str] = field(default_factory=set)
    long: int = 0
    shortest: int = 0

    def reasons(self, tokenizer: Any, most: int) -> list[str]:
        """Each cause that there is, with what to do about it."""
        found = []
        if self.unknown:
            shown = "".join(sorted(self.characters)[:_SHOWN])
            found.append(
                f"{self.unknown} have characters that the model's tokenizer does not know ({shown})"
                f"{_knows(tokenizer)}: write the prompts in characters that it knows, or set another model.path"
            )
        if self.long:
            found.append(
                f"{self.long} are longer than rollout.max_prompt_length={most}, of which the shortest has "
                f"{self.shortest} tokens: raise it"
            )
        if self.empty:
            found.append(f"{self.empty} are empty")
        return found


def _knows(tokenizer: Any) -> str:
    """A small vocabulary in words; a large one says nothing to anybody."""
    vocabulary = tokenizer.get_vocab()
    characters = "".join(token for token in sorted(vocabulary, key=vocabulary.get) if len(token) == 1)
    return f", which knows '{characters}'" if characters and len(vocabulary) <= _SMALL_VOCABULARY else ""


def _no_text(value: object) -> str:
    """Why ``value`` cannot be tokenised and sent as a text; empty if it can."""
    if not isinstance(value, str):
        return f"is {type(value).__name__}, where str is expected: {repr(value)[:60]}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = slice(error.start, error.end)
        return f"has half a surrogate pair at character {error.start}, which is no text: {value[place]!r}"
    return ""


class PromptFeed:
    """The prompts of a run, in order.

    Raises TaskError at construction for an item that is no text, and when fewer than ``rollout.groups_per_step`` items
    are usable.
    """

    def __init__(
        self, *, task: TaskConfig, rollout: RolloutConfig, tokenizer: Any, seed: int, max_eval_prompts: int = 64
    ) -> None:
        self._task, self._rollout, self._seed = task, rollout, seed
        self._encode = _encoder(tokenizer, chat=task.chat_template)
        self._max_eval_prompts = max_eval_prompts
        self._tokenizer = tokenizer
        items = load_items(task, Split.TRAIN, seed)
        self._train, left_out = self._usable(items, Split.TRAIN)
        self._eval: list[tuple[Item, Int32Array]] | None = None
        self._order: tuple[int, Int32Array] = (-1, np.empty(0, np.int32))
        if len(self._train) < rollout.groups_per_step:
            causes = left_out.reasons(tokenizer, rollout.max_prompt_length)
            raise TaskError(
                f"task.prompts: {len(self._train)} usable prompts of {len(items)} are fewer than the "
                f"{rollout.groups_per_step} of one step (rollout.groups_per_step): "
                + "; ".join(causes or ["lower it, or give more prompts"])
            )

    def __len__(self) -> int:
        """N, the prompts of one epoch."""
        return len(self._train)

    @property
    def positions(self) -> int | None:
        """Prompts of the whole run, N times ``task.total_epochs``; None where the feed is endless."""
        return len(self) * self._task.total_epochs or None

    def from_frontier(self, frontier: Frontier) -> Iterator[Prompt]:
        """The prompts that have not ended, by position; endless, or to the end of ``task.total_epochs``."""
        position = frontier.base
        while self.positions is None or position < self.positions:
            if not frontier.has(position):
                yield self.at(position)
            position += 1

    def at(self, position: int) -> Prompt:
        """The training prompt at ``position``, the same for every caller."""
        epoch, place = divmod(position, len(self))
        item, token_ids = self._train[self._permutation(epoch)[place]]
        return Prompt(
            item=str(position),
            position=position,
            epoch=epoch,
            split=Split.TRAIN,
            token_ids=token_ids,
            text=item.text,
            reference=item.reference,
            n=self._rollout.completions_per_group,
            temperature=self._rollout.temperature,
            max_tokens=self._rollout.max_response_length,
            seed=_derived(self._seed, Split.TRAIN, position),
        )

    def eval_prompts(self, version: int) -> list[Prompt]:
        """The evaluation round at a learner version: one greedy answer to each of the first items held out."""
        if self._eval is None:
            items = load_items(self._task, Split.EVAL, self._seed)[: self._max_eval_prompts]
            self._eval, _ = self._usable(items, Split.EVAL)
        return [
            Prompt(
                item=f"eval{version}.{i}",
                position=i,
                epoch=0,
                split=Split.EVAL,
                token_ids=token_ids,
                text=item.text,
                reference=item.reference,
                n=1,
                temperature=0.0,
                max_tokens=self._rollout.max_response_length,
                seed=_derived(self._seed, Split.EVAL, i),
            )
            for i, (item, token_ids) in enumerate(self._eval)
        ]

    def _usable(self, items: Sequence[Item], split: Split) -> tuple[list[tuple[Item, Int32Array]], LeftOut]:
        kept: list[tuple[Item, Int32Array]] = []
        out, most = LeftOut(), self._rollout.max_prompt_length
        for item in items:
            token_ids = self._encode(item.text)
            if token_ids is None:
                out.unknown += 1
                out.characters |= {one for one in item.text if self._encode(one) is None}
            elif not token_ids:
                out.empty += 1
            elif len(token_ids) > most:
                out.long += 1
                out.shortest = min(out.shortest or len(token_ids), len(token_ids))
            else:
                kept.append((item, np.array(token_ids, np.int32)))
        if len(kept) < len(items) or not kept:
            causes = "; ".join(out.reasons(self._tokenizer, most))
            log.warning("%s prompts: %d of %d usable; %s", split, len(kept), len(items), causes)
        return kept, out

    def _permutation(self, epoch: int) -> Int32Array:
        if self._order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self)).astype(np.int32)
            self._order = (epoch, order)
        return self._order[1]


def _derived(seed: int, split: Split, position: int) -> int:
    """31 bits that differ between positions, splits and runs, and are the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{split}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def _encoder(tokenizer: Any, *, chat: bool) -> Callable[[str], list[int] | None]:
    """From text to token ids with BOS exactly once where this tokenizer has it at all; None for unknown characters.

    Templates write BOS into their text, and tokenizers put one in front of any text: together that is two of them.
    """
    if chat and not tokenizer.chat_template:
        raise TaskError("task.chat_template: the model's tokenizer has no chat template; set it to false")
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    if unknown in (bos, tokenizer.eos_token_id, tokenizer.pad_token_id):
        unknown = None  # one id with two duties says nothing about the text
    adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]

    def encode(text: str) -> list[int] | None:
        if chat:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if unknown is not None and unknown in token_ids:
            return None
        if adds_bos:
            while token_ids[:1] == [bos]:
                token_ids = token_ids[1:]
            token_ids = [bos, *token_ids]
        return token_ids

    return encode
