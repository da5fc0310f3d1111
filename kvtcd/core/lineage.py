"""Which block continues which: the tree of prefixes."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.keys import RecordKey

REACH = 1 << 12
"""Continuations of this many tokens or more are all alike: no recent window is longer."""


class Lineage:
    """Children of each block. A parent need not be known itself."""

    def __init__(self) -> None:
        self._children: dict[RecordKey, dict[RecordKey, int]] = {}

    def add(self, parent: RecordKey, key: RecordKey, tokens: int) -> None:
        """Note that `key`, a block of `tokens` tokens, continues `parent`."""
        self._children.setdefault(parent, {})[key] = tokens

    def discard(self, parent: RecordKey, key: RecordKey) -> None:
        """Forget that `key` continues `parent`."""
        siblings = self._children[parent]
        del siblings[key]
        if not siblings:
            del self._children[parent]

    def children(self, parent: RecordKey) -> Iterator[tuple[RecordKey, int]]:
        """Yield (key, tokens) of the blocks that continue `parent`."""
        return iter(tuple(self._children.get(parent, {}).items()))

    def lengths(self, parent: RecordKey) -> set[int]:
        """Return the block lengths, in tokens, among the continuations of `parent`."""
        return set(self._children.get(parent, {}).values())

    def after(self, key: RecordKey) -> int:
        """Return the tokens of the longest known continuation, 0 for a leaf, at most about `REACH`."""
        reach, generation = 0, [key]
        while reach < REACH:
            below = [child for parent in generation for child in self.children(parent)]
            if not below:
                break
            # Only full blocks have children, so the longest block of a generation leads on.
            reach += max(tokens for _, tokens in below)
            generation = [child for child, _ in below]
        return reach
