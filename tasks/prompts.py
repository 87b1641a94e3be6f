"""From a task's items to prompts: tokenising, length filter, and the order of the endless feed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Item:
    """One entry of a prompt set.

    Attributes:
        text: the prompt, or the user's message where ``task.chat_template`` is set.
        reference: handed to the reward function as it is.
    """

    text: str
    reference: str
