"""Who is where: copies, the blocks that have them, and the sums of a tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvtcd.core.events import Action, Drop, Lost, Move, Reason, Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.lineage import Lineage
from kvtcd.core.replacement import Replacement


class State(IntEnum):
    """State of a copy; absent is the lack of a copy."""

    FILLING = 0
    READY = 1
    DROPPING = 2


@dataclass(slots=True)
class Copy:
    """One block in one tier; `nbytes` is what it is accounted with."""

    state: State
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The move in progress of a block; `leaving`: its source is counted as on the way out."""

    source: Tier
    target: Tier
    leaving: bool


@dataclass(slots=True)
class Entry:
    """One block: what it is, where it lies, who reads it, who waits for it.

    Attributes:
        behind: copy it down as soon as it is there.
        packable: there is a tier below that takes it.
        failed: its last way down failed; eviction drops it, only a new request tries again.
        evict: drop the host copy as soon as there is one below and nobody reads.
        doomed: serve it no more, and drop all copies as soon as nobody uses them.
        readers: tickets of gets that wait for a host copy.
    """

    namespace: int
    tokens: int
    raw_bytes: int
    parent: RecordKey | None
    supersedes: RecordKey | None = None
    behind: bool = False
    packable: bool = True
    failed: bool = False
    evict: bool = False
    doomed: bool = False
    pins: int = 0
    copies: dict[Tier, Copy] = field(default_factory=dict)
    transfer: Transfer | None = None
    readers: list[int] = field(default_factory=list)

    def ready(self, tier: Tier) -> bool:
        """Tell whether this tier has a copy that can be read."""
        copy = self.copies.get(tier)
        return copy is not None and copy.state is State.READY


class Shelf:
    """The sums of one tier: capacity, what is used, what is about to be free.

    Args:
        capacity: bytes.
        high: share of the capacity above which copies are moved out ahead of need.
        low: share down to which they are.
        order: who goes first.
        granule: bytes that room is given out in.
    """

    def __init__(
        self, capacity: int, high: float, low: float, order: Replacement, *, granule: int = 1
    ) -> None:
        self.capacity = capacity
        self.high, self.low = int(capacity * high), int(capacity * low)
        self.order = order
        self.used = 0
        self.leaving = 0
        self._granule = granule

    def footprint(self, nbytes: int) -> int:
        """Return the bytes a copy of `nbytes` takes here."""
        return -(-nbytes // self._granule) * self._granule

    def fits(self, nbytes: int) -> bool:
        """Tell whether a footprint of `nbytes` can be reserved now."""
        return self.used + nbytes <= self.capacity

    def excess(self, need: int) -> int:
        """Return the bytes to move out so that `need` more find room; 0 below the high mark."""
        projected = self.used - self.leaving + need
        return projected - self.low if projected > self.high else 0

    def shortfall(self, need: int) -> int:
        """Return the bytes to move out so that `need` more just fit."""
        return max(0, self.used - self.leaving + need - self.capacity)


class Residents:
    """All blocks and their copies, and the actions that keep the tiers in step with them.

    Args:
        shelves: sums of each tier that exists; the host tier must.
    """

    def __init__(self, shelves: dict[Tier, Shelf]) -> None:
        self.shelves = shelves
        self.entries: dict[RecordKey, Entry] = {}
        self.lineage = Lineage()
        self.actions: list[Action] = []

    def tiers(self, key: RecordKey) -> tuple[Tier, ...]:
        """Return the tiers that can serve a block, fastest first; a block on its way in is not served."""
        entry = self.entries.get(key)
        return () if entry is None or entry.doomed else tuple(t for t in Tier if entry.ready(t))

    def admit(self, key: RecordKey, entry: Entry, tier: Tier, copy: Copy) -> None:
        """Take in a block with its first copy."""
        self.entries[key] = entry
        entry.copies[tier] = copy
        self.shelves[tier].used += copy.nbytes
        if entry.parent is not None:
            self.lineage.add(entry.parent, key, entry.tokens)
        if copy.state is State.READY:
            self.shelves[tier].order.insert(key)

    def ready(self, key: RecordKey, tier: Tier, nbytes: int | None = None) -> None:
        """Make a FILLING copy READY, accounted with `nbytes` if its true size is known only now."""
        copy, shelf = self.entries[key].copies[tier], self.shelves[tier]
        if nbytes is not None:
            size = shelf.footprint(nbytes)
            shelf.used += size - copy.nbytes
            copy.nbytes = size
        copy.state = State.READY
        shelf.order.insert(key)

    def touch(self, key: RecordKey) -> None:
        """Note a use in every tier."""
        for shelf in self.shelves.values():
            shelf.order.touch(key)

    def begin(self, key: RecordKey, transfer: Transfer, need: int) -> None:
        """Reserve `need` bytes in the target and start the move."""
        entry = self.entries[key]
        entry.copies[transfer.target] = Copy(State.FILLING, need)
        entry.transfer = transfer
        self.shelves[transfer.target].used += need
        if transfer.leaving:
            self.shelves[transfer.source].leaving += entry.copies[transfer.source].nbytes
        self.actions.append(Move(key, transfer.source, transfer.target, self.lineage.after(key)))

    def end(self, key: RecordKey) -> Transfer:
        """Note that the move of a block has ended, either way."""
        entry = self.entries[key]
        transfer, entry.transfer = entry.transfer, None
        assert transfer is not None, "the mover reported the end of a move that did not run"
        if transfer.leaving:
            self.shelves[transfer.source].leaving -= entry.copies[transfer.source].nbytes
        return transfer

    def drop(self, key: RecordKey, tier: Tier) -> None:
        """Let a copy go that nobody uses."""
        copy, shelf = self.entries[key].copies[tier], self.shelves[tier]
        copy.state = State.DROPPING
        shelf.order.discard(key)
        shelf.leaving += copy.nbytes
        self.actions.append(Drop(key, tier))

    def lose(self, key: RecordKey, tier: Tier, reason: Reason) -> None:
        """Let a copy go, and say so if it was the last one that could be read."""
        entry = self.entries[key]
        self.drop(key, tier)
        if not any(entry.ready(t) for t in Tier):
            self.actions.append(Lost(key, entry.namespace, reason))

    def let_go(self, key: RecordKey) -> None:
        """Drop what is not to be kept, if nobody uses it now."""
        entry = self.entries[key]
        if entry.pins or entry.transfer:
            return
        if entry.doomed:
            for tier in Tier:
                if entry.ready(tier):
                    self.drop(key, tier)
        elif entry.evict and entry.ready(Tier.DISK) and entry.ready(Tier.HOST):
            self.drop(key, Tier.HOST)

    def dropped(self, key: RecordKey, tier: Tier) -> Entry:
        """Note that a copy is gone; a block without copies is forgotten."""
        entry, shelf = self.entries[key], self.shelves[tier]
        copy = entry.copies.pop(tier)
        if tier is Tier.HOST:
            entry.evict = False
        shelf.used -= copy.nbytes
        shelf.leaving -= copy.nbytes
        if not entry.copies:
            del self.entries[key]
            if entry.parent is not None:
                self.lineage.discard(entry.parent, key)
        return entry

    def victims(self, tier: Tier, excess: int) -> list[RecordKey]:
        """Return the coldest copies that nobody uses, enough to free `excess` bytes if there are."""
        chosen: list[RecordKey] = []
        for key in self.shelves[tier].order.coldest() if excess > 0 else ():
            entry = self.entries[key]
            # Read, moving, or the copy that the host's is to leave for.
            if entry.transfer or (entry.pins if tier is Tier.HOST else entry.evict):
                continue
            chosen.append(key)
            excess -= entry.copies[tier].nbytes
            if excess <= 0:
                break
        return chosen
