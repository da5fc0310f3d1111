"""Which prefixes are matched most often, in bounded memory: the Space-Saving sketch.

Metwally, Agrawal, El Abbadi: "Efficient computation of frequent and top-k elements in data streams", 2005,
section 3. A prefix goes by its first block: all sequences that begin alike share that one.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated

from kvtcd.core.keys import EngineKey
from kvtcd.core.message import SPARSE, Answer
from kvtcd.core.messages import Count

SIZE = 64
"""Counters of one namespace."""


@dataclass(slots=True)
class Popular:
    """One counter.

    Attributes:
        key: of the first block.
        salt: of the blocks, empty if they have none.
        matches: that found something; never too few.
        over: by how much `matches` may be too many.
        blocks: of the longest prefix that was found, since this counter is this one's.
    """

    key: EngineKey
    salt: bytes
    matches: int
    over: int
    blocks: int

    def info(self, namespace: str) -> PrefixInfo:
        """Return what is told of it."""
        salt = base64.urlsafe_b64encode(self.salt).decode() if self.salt else None
        return PrefixInfo(namespace, self.key, self.matches, self.over, self.blocks, salt)


@dataclass(frozen=True, slots=True)
class PrefixInfo(Answer):
    """A prefix that is matched often; see `Popular`. A salt is given where there is one."""

    namespace: str
    key: EngineKey
    matches: Count
    over: Count
    blocks: Count
    salt: Annotated[str | None, SPARSE] = None


@dataclass(frozen=True, slots=True)
class Prefixes(Answer):
    """Those that are matched most, first."""

    prefixes: tuple[PrefixInfo, ...]


class Popularity:
    """Counts matches by what they begin with.

    What was matched more often than once in `size` matches has a counter for certain; a newcomer takes the
    counter of the least, and what that one had counted (its `over`).

    Args:
        size: counters.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._counters: dict[tuple[bytes, bytes], Popular] = {}

    def found(self, key: EngineKey, salt: bytes, blocks: int) -> None:
        """Count a match that found so many blocks."""
        name = (salt, key)
        counter = self._counters.get(name)
        if counter is None:
            before = 0
            if len(self._counters) >= self._size:
                least = min(self._counters.values(), key=lambda known: known.matches)
                del self._counters[least.salt, least.key]
                before = least.matches
            counter = self._counters[name] = Popular(key, salt, before, before, 0)
        counter.matches += 1
        counter.blocks = max(counter.blocks, blocks)

    def most(self, number: int) -> list[Popular]:
        """Return so many counters, those of the most matches first."""
        return sorted(self._counters.values(), key=lambda counter: -counter.matches)[:number]
