"""Who reads which copy: it stays, with its bytes, until the last of them is done."""

from __future__ import annotations

from collections import Counter

from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place


class Pins:
    """Readers of copies, counted by block and place."""

    def __init__(self) -> None:
        self._readers: dict[RecordKey, Counter[Place]] = {}

    def __contains__(self, key: RecordKey) -> bool:
        """Tell whether somebody reads a block, from whatever place."""
        return key in self._readers

    def __len__(self) -> int:
        """Return how many blocks are read."""
        return len(self._readers)

    def at(self, key: RecordKey, place: Place) -> int:
        """Return how many read a copy."""
        readers = self._readers.get(key)
        return readers[place] if readers else 0

    def take(self, key: RecordKey, place: Place, readers: int = 1) -> None:
        """Note that some begin to read a copy."""
        self._readers.setdefault(key, Counter())[place] += readers

    def give_back(self, key: RecordKey, place: Place) -> None:
        """Note that a reader of a copy is done."""
        readers = self._readers[key]
        readers[place] -= 1
        if not readers.total():
            del self._readers[key]
