"""Which block continues which: the tree of prefixes, woven through the entries themselves."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.entry import Entry
from kvtcd.core.keys import RecordKey

REACH = 1 << 12
"""Continuations of this many tokens or more are all alike: no recent window is longer."""


class Lineage:
    """Children of each block. A parent need not be known itself.

    Args:
        entries: all known blocks; a block is added after it was put there, removed after it was taken out.
    """

    def __init__(self, entries: dict[RecordKey, Entry]) -> None:
        self._entries = entries
        self._orphans: dict[RecordKey, Entry] = {}
        """The first child of each parent that is not known."""

    def add(self, entry: Entry) -> None:
        """Hang a block below its parent, and those that wait for it below itself."""
        entry.child = child = self._orphans.pop(entry.key, None)
        while child is not None:
            child.parent = entry.key  # one copy of the key for all
            child = child.younger
        if entry.parent is None:
            return
        parent = self._entries.get(entry.parent)
        first = parent.child if parent else self._orphans.get(entry.parent)
        if parent is not None:
            parent.child, entry.parent = entry, parent.key
        else:
            self._orphans[entry.parent] = entry
        if first is not None:
            first.elder, entry.younger, entry.parent = entry, first, first.parent

    def remove(self, entry: Entry) -> None:
        """Take a block out; those that continue it stay known as the children of its key."""
        if entry.child is not None:
            self._orphans[entry.key] = entry.child
        if entry.younger is not None:
            entry.younger.elder = entry.elder
        if entry.elder is not None:
            entry.elder.younger = entry.younger
        elif entry.parent is not None:
            self._set_first(entry.parent, entry.younger)

    def _set_first(self, parent: RecordKey | None, child: Entry | None) -> None:
        assert parent is not None, "a child has a parent"
        known = self._entries.get(parent)
        if known is not None:
            known.child = child
        elif child is not None:
            self._orphans[parent] = child
        else:
            del self._orphans[parent]

    def children(self, parent: RecordKey) -> Iterator[Entry]:
        """Yield the blocks that continue `parent`, the last added first."""
        known = self._entries.get(parent)
        child = known.child if known else self._orphans.get(parent)
        while child is not None:
            yield child
            child = child.younger

    def lengths(self, parent: RecordKey) -> set[int]:
        """Return the block lengths, in tokens, among the continuations of `parent`."""
        return {child.tokens for child in self.children(parent)}

    def after(self, key: RecordKey) -> int:
        """Return the tokens of the longest known continuation, 0 for a leaf, at most about `REACH`."""
        reach, generation = 0, [key]
        while reach < REACH:
            below = [child for parent in generation for child in self.children(parent)]
            if not below:
                break
            # Only full blocks have children, so the longest block of a generation leads on.
            reach += max(child.tokens for child in below)
            generation = [child.key for child in below]
        return reach
