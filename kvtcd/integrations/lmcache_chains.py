"""What LMCache does not say with an object: where it begins and what it continues.

LMCache looks a whole prompt up, from its first chunk on and in order, before it stores what was missing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvtcd.core.keys import EngineKey

REMEMBERED = 1 << 16
"""Chunks: some ten MB."""


@dataclass(frozen=True, slots=True)
class Position:
    """Number of a chunk in its sequence, and the key of the one before it."""

    number: int
    parent: EngineKey | None


class Chains:
    """The chunks that were looked up last. Any thread may use it."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._positions: OrderedDict[tuple[Hashable, EngineKey], Position] = OrderedDict()

    def seen(self, where: Hashable, keys: Sequence[EngineKey]) -> None:
        """Note a sequence of one namespace and salt, from its first chunk on."""
        with self._lock:
            parent = None
            for number, key in enumerate(keys):
                self._positions[where, key] = Position(number, parent)
                self._positions.move_to_end((where, key))
                parent = key
            while len(self._positions) > self._most:
                self._positions.popitem(last=False)

    def find(self, where: Hashable, key: EngineKey) -> Position | None:
        """Return where a chunk lies, None if it was not looked up lately."""
        with self._lock:
            return self._positions.get((where, key))
