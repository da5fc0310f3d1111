"""Who is where: all blocks, their copies, and the actions that keep the tiers in step with them."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.entry import Copy, Entry, Kind, State, Transfer
from kvtcd.core.events import Action, Drop, Lost, Move, Reason, Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.lineage import Lineage
from kvtcd.core.shelf import Shelf

_NUMBERS = 1 << 16
"""Numbers to keep one object of each of."""


class Residents:
    """All blocks and their copies, and the actions that keep the tiers in step with them.

    Args:
        shelves: sums of each tier that exists; the host tier must.

    Attributes:
        transfers: the moves that run.
        superseding: the partial sibling that each of these blocks makes superfluous.
        now: the catalog's clock, in whole seconds.
    """

    def __init__(self, shelves: dict[Tier, Shelf]) -> None:
        self.shelves = shelves
        self.entries: dict[RecordKey, Entry] = {}
        self.lineage = Lineage(self.entries)
        self.transfers: dict[RecordKey, Transfer] = {}
        self.superseding: dict[RecordKey, RecordKey] = {}
        self.actions: list[Action] = []
        self.now = 0
        self._parts: list[RecordKey] = []
        self._kinds: dict[Kind, Kind] = {}
        self._numbers: dict[int, int] = {}

    def tiers(self, key: RecordKey) -> tuple[Tier, ...]:
        """Return the tiers that can serve a block, fastest first; a block on its way in is not served."""
        entry = self.entries.get(key)
        if entry is None or entry.doomed or self.expired(entry):
            return ()
        return tuple(tier for tier in Tier if entry.ready(tier))

    def expired(self, entry: Entry) -> bool:
        """Tell whether the time of a block is over."""
        return entry.expires is not None and entry.expires <= self.now

    def part(self, size: int) -> list[RecordKey]:
        """Return the next keys of a round through all blocks; some may have gone since it began."""
        self._parts = self._parts or list(self.entries)
        part = self._parts[-size:]
        del self._parts[-size:]
        return part

    def admit(self, entry: Entry, tier: Tier, state: State, nbytes: int) -> None:
        """Take in a block with its first copy."""
        entry.kind = self._kinds.setdefault(entry.kind, entry.kind)
        entry.position = self._shared(entry.position)
        self.entries[entry.key] = entry
        if entry.parent == entry.key:
            entry.parent = None
        self.lineage.add(entry)
        for child in self.lineage.children(entry.key):
            entry.children += len([t for t in Tier if child.ready(t)])
            entry.host_children += child.ready(Tier.HOST)
        entry.put(tier, Copy(entry, State.FILLING, self._shared(nbytes)))
        self.shelves[tier].used += nbytes
        if state is State.READY:
            self.ready(entry, tier)

    def ready(self, entry: Entry, tier: Tier, nbytes: int | None = None) -> None:
        """Make a FILLING copy READY, accounted with `nbytes` if its true size is known only now."""
        copy, shelf = self._copy(entry, tier), self.shelves[tier]
        if nbytes is not None:
            size = shelf.footprint(nbytes)
            shelf.used += size - copy.nbytes
            copy.nbytes = self._shared(size)
        copy.state = State.READY
        shelf.order.insert(copy)
        shelf.blocks += 1
        if (parent := self._parent(entry)) is not None:
            parent.children += 1
            parent.host_children += tier is Tier.HOST

    def _shared(self, number: int) -> int:
        """Return the one object for a number: there are few sizes and positions, but many blocks."""
        if len(self._numbers) > _NUMBERS:
            self._numbers.clear()
        return self._numbers.setdefault(number, number)

    def _copy(self, entry: Entry, tier: Tier) -> Copy:
        copy = entry.at(tier)
        assert copy is not None, "there is such a copy"
        return copy

    def _parent(self, entry: Entry) -> Entry | None:
        return None if entry.parent is None else self.entries.get(entry.parent)

    def use(self, key: RecordKey) -> None:
        """Count a use of a block, in every tier."""
        for shelf, copy in self._listed(key):
            shelf.order.use(copy)

    def renew(self, key: RecordKey) -> None:
        """Make a block the youngest of its like in every tier; an unknown one is ignored."""
        for shelf, copy in self._listed(key):
            shelf.order.renew(copy)

    def _listed(self, key: RecordKey) -> Iterator[tuple[Shelf, Copy]]:
        entry = self.entries.get(key)
        for tier, shelf in self.shelves.items() if entry else ():
            if entry and (copy := entry.at(tier)) and copy.state is State.READY:
                shelf.held.pop(key, None)
                yield shelf, copy

    def begin(self, entry: Entry, transfer: Transfer, need: int) -> None:
        """Reserve `need` bytes in the target and start the move."""
        entry.put(transfer.target, Copy(entry, State.FILLING, need))
        self.transfers[entry.key] = transfer
        self.shelves[transfer.target].used += need
        if transfer.leaving:
            self.shelves[transfer.source].leaving += self._copy(entry, transfer.source).nbytes
        after = self.lineage.after(entry.key)
        self.actions.append(Move(entry.key, transfer.source, transfer.target, after))

    def end(self, entry: Entry) -> Transfer:
        """Note that the move of a block has ended, either way."""
        transfer = self.transfers.pop(entry.key)
        if transfer.leaving:
            self.shelves[transfer.source].leaving -= self._copy(entry, transfer.source).nbytes
        return transfer

    def drop(self, entry: Entry, tier: Tier) -> None:
        """Let a copy go that nobody uses."""
        copy, shelf = self._copy(entry, tier), self.shelves[tier]
        if copy.state is State.READY:
            shelf.order.discard(copy)
            shelf.held.pop(entry.key, None)
            shelf.blocks -= 1
            self._one_child_less(entry, tier)
        copy.state = State.DROPPING
        shelf.leaving += copy.nbytes
        self.actions.append(Drop(entry.key, tier))

    def _one_child_less(self, entry: Entry, tier: Tier) -> None:
        parent = self._parent(entry)
        if parent is None:
            return
        parent.children -= 1
        parent.host_children -= tier is Tier.HOST
        for above, shelf in self.shelves.items():
            if parent.key in shelf.held and not parent.continued(above):
                del shelf.held[parent.key]
                shelf.order.release(self._copy(parent, above))

    def lose(self, entry: Entry, tier: Tier, reason: Reason) -> None:
        """Let a copy go, and say so if it was the last one that could be read."""
        self.drop(entry, tier)
        if not any(entry.ready(t) for t in Tier):
            self.actions.append(Lost(entry.key, entry.namespace, reason))

    def let_go(self, entry: Entry) -> None:
        """Drop what is not to be kept, if nobody uses it now."""
        if entry.pins or entry.key in self.transfers:
            return
        if entry.doomed:
            for tier in Tier:
                if entry.ready(tier):
                    self.drop(entry, tier)
        elif entry.evict and entry.ready(Tier.DISK) and entry.ready(Tier.HOST):
            self.drop(entry, Tier.HOST)

    def dropped(self, entry: Entry, tier: Tier) -> None:
        """Note that a copy is gone; a block without copies is forgotten."""
        copy, shelf = self._copy(entry, tier), self.shelves[tier]
        entry.put(tier, None)
        if tier is Tier.HOST:
            entry.evict = False
        if tier is Tier.HOST:
            entry.evict = False
        shelf.used -= copy.nbytes
        shelf.leaving -= copy.nbytes
        if not entry.copies:
            del self.entries[entry.key]
            self.superseding.pop(entry.key, None)
            self.lineage.remove(entry)
