"""Who goes first: an order over keys, never a move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvtcd.core.keys import RecordKey


class Replacement(Protocol):
    """Order of the copies of one tier."""

    def __len__(self) -> int:
        """Return how many keys are held."""

    def insert(self, key: RecordKey) -> None:
        """Take in a key as the youngest."""

    def touch(self, key: RecordKey) -> None:
        """Note a use; a key that is not held is ignored."""

    def discard(self, key: RecordKey) -> None:
        """Forget a key; one that is not held is ignored."""

    def coldest(self) -> Iterator[RecordKey]:
        """Yield keys, first victim first. The order must not be changed while iterating."""


class Lru:
    """Least recently used first."""

    def __len__(self) -> int:
        return len(self._order)

    def __init__(self) -> None:
        self._order: dict[RecordKey, None] = {}

    def insert(self, key: RecordKey) -> None:
        """Take in a key as the youngest."""
        self._order.pop(key, None)
        self._order[key] = None

    def touch(self, key: RecordKey) -> None:
        """Make a held key the youngest."""
        if key in self._order:
            self.insert(key)

    def discard(self, key: RecordKey) -> None:
        """Forget a key."""
        self._order.pop(key, None)

    def coldest(self) -> Iterator[RecordKey]:
        """Yield keys from the least recently used on."""
        return iter(self._order)
