"""A dictionary that knows which of its keys have changed, so that a store can write just those."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Rows(dict[K, V]):
    """Values are never changed in place: a change is an assignment. ``changed`` is None until somebody keeps track."""

    changed: set[K] | None = None

    def keep_track(self) -> None:
        """From now on ``changed`` collects the keys set or removed; whoever writes them clears it."""
        self.changed = set()

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if self.changed is not None:
            self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        if self.changed is not None:
            self.changed.add(key)

    def take(self, key: K) -> V | None:
        """Removes and returns a value, None if there is none."""
        value = self.get(key)
        if value is not None:
            del self[key]
        return value

    def put_all(self, keys: Iterable[K], value: V) -> None:
        """The same value for all these keys."""
        for key in keys:
            self[key] = value

    def remove_all(self) -> None:
        """Empties it, key by key."""
        for key in list(self):
            del self[key]
