"""Who is where: all blocks, their copies, and the actions that keep the tiers in step with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvtcd.core.devices import GpuName
from kvtcd.core.entry import Copy, Entry, State, Transfer
from kvtcd.core.events import Action, Drop, Found, Govern, Lost, Move
from kvtcd.core.gpus import Gpus
from kvtcd.core.interned import Interned
from kvtcd.core.keys import RecordKey
from kvtcd.core.lineage import Lineage
from kvtcd.core.pins import Pins
from kvtcd.core.place import MEMORY, Place, Tier
from kvtcd.core.policy import Policy
from kvtcd.core.reason import Reason
from kvtcd.core.shelf import Part, Shelf, marks


class Residents:
    """All blocks and their copies, and the actions that keep the tiers in step with them.

    Args:
        shelves: sums of host and disk, if there is one.
        gpus: those that hold blocks.

    Attributes:
        rules: what holds for each namespace.
        transfers: the moves that run.
        superseding: the partial sibling that each of these blocks makes superfluous.
        pins: who reads what.
        leases: of these blocks.
        doomed: serve these no more, and drop all their copies as soon as nobody uses them.
        failed: their last way down failed; eviction drops them, only a new request tries again.
        refused: a full disk did not take them, once.
        outgoing: places that these blocks leave as soon as they have a copy elsewhere and nobody reads.
        now: the catalog's clock, in whole seconds.
    """

    def __init__(self, shelves: dict[Tier, Shelf], gpus: Gpus) -> None:
        self.shelves, self.gpus = shelves, gpus
        self.rules: dict[int, Govern] = {}
        self.entries: dict[RecordKey, Entry] = {}
        self.lineage = Lineage(self.entries)
        self.transfers: dict[RecordKey, Transfer] = {}
        self.superseding: dict[RecordKey, RecordKey] = {}
        self.pins = Pins()
        self.leases: Counter[RecordKey] = Counter()
        self.doomed: set[RecordKey] = set()
        self.failed: set[RecordKey] = set()
        self.refused: set[RecordKey] = set()
        self.outgoing: dict[RecordKey, tuple[Place, ...]] = {}
        self.actions: list[Action] = []
        self.now = 0
        self._interned = Interned()

    def govern(self, rules: Govern) -> None:
        """Let something hold for a namespace from now on."""
        policy = rules.policy
        self.rules[rules.namespace] = rules
        for tier, shelf in self.shelves.items():
            share = policy.share.disk if tier is Tier.DISK else policy.share.host
            shelf.govern(rules.namespace, rules.tenant, share, marks(policy, tier), policy.evict)
        if self.gpus.govern(rules):
            for key in self.gpus.lifted():
                if (entry := self.entries[key]).namespace == rules.namespace:
                    self.let_go(entry)

    @property
    def tiers(self) -> dict[Tier, list[Shelf]]:
        """The shelves of each tier that exists, fastest first."""
        gpus = {Tier.GPU: list(self.gpus.shelves.values())} if self.gpus.shelves else {}
        return gpus | {tier: [shelf] for tier, shelf in self.shelves.items()}

    def mark(self, policy: Policy) -> None:
        """Set the marks of the whole tiers."""
        for tier, shelf in self.shelves.items():
            shelf.remark(marks(policy, tier))

    def ungovern(self, namespace: int) -> None:
        """Forget a namespace that has no blocks."""
        self.rules.pop(namespace, None)
        self._interned.forget(namespace)
        for shelf in self.shelves.values():
            shelf.ungovern(namespace)
        self.gpus.ungovern(namespace)

    def places(self, key: RecordKey) -> tuple[Place, ...]:
        """Return the places that can serve a block, fastest first; a block on its way in is not served."""
        entry = self.entries.get(key)
        if entry is None or key in self.doomed or self.expired(entry):
            return ()
        return entry.places

    def fastest(self, key: RecordKey) -> tuple[int, Place] | None:
        """Return the tokens of a block and the first of its `places`."""
        entry = self.entries.get(key)
        if entry is None or key in self.doomed or (entry.expires is not None and self.expired(entry)):
            return None
        place = entry.fastest
        return None if place is None else (entry.kind.tokens, place)

    def expired(self, entry: Entry) -> bool:
        """Tell whether the time of a block is over; a lease gives it more."""
        return entry.expires is not None and entry.expires <= self.now and entry.key not in self.leases

    def on_disk(self, namespace: int) -> bool:
        """Tell whether the blocks of a namespace may go to disk."""
        return Tier.DISK in self.shelves and self.rules[namespace].on_disk

    def admit(self, entry: Entry, place: Place, nbytes: int) -> None:
        """Take in a block with its first copy."""
        entry.kind = self._interned.kind(*entry.kind)
        entry.position = self._interned.number(entry.position)
        self._enter(entry)
        self._fill(entry, place, nbytes)

    def recover(self, found: Sequence[Found]) -> None:
        """Take in blocks that lie on disk: a million at a start, so what can be done once for many is."""
        shelf, booked, entries = self.shelves[Tier.DISK], Counter[int](), self.entries
        parts, interned = shelf.parts[Place.DISK], self._interned
        for key, namespace, tokens, raw_bytes, nbytes, parent, position, ttl in found:
            expires = None if ttl is None else self.now + ttl
            kind = interned.kind(namespace, tokens, raw_bytes)
            entry = Entry(key, kind, interned.number(position), parent, expires)
            self._enter(entry)
            entry.disk = copy = Copy(entry, State.READY, interned.number(nbytes))
            parts[namespace].insert(copy)
            booked[namespace] += nbytes
            if entry.parent is not None and (above := entries.get(entry.parent)) is not None:
                above.children += 1
        for namespace, nbytes in booked.items():
            shelf.book(namespace, nbytes)

    def _enter(self, entry: Entry) -> None:
        """Make a block known, that has no copy yet."""
        self.entries[entry.key] = entry
        if entry.parent == entry.key:
            entry.parent = None
        self.lineage.add(entry)
        if entry.child is not None:
            for child in self.lineage.children(entry.key):
                entry.children += sum(child.ready(p) for p in Place)
                entry.near_children += sum(child.ready(p) for p in MEMORY)

    def _fill(self, entry: Entry, place: Place, nbytes: int) -> None:
        if place is Place.GPU:
            self.gpus.enter(entry.key, entry.namespace)
        entry.put(place, Copy(entry, State.FILLING, self._interned.number(nbytes)))
        self._shelf(entry, place).book(entry.namespace, nbytes)

    def ready(self, entry: Entry, place: Place, nbytes: int | None = None) -> None:
        """Make a FILLING copy READY, accounted with `nbytes` if its true size is known only now."""
        copy, shelf = self._copy(entry, place), self._shelf(entry, place)
        if nbytes is not None:
            size = shelf.footprint(nbytes)
            shelf.book(entry.namespace, size - copy.nbytes)
            copy.nbytes = self._interned.number(size)
        copy.state = State.READY
        self._seats(entry, place).insert(copy)
        if (parent := self._parent(entry)) is not None:
            parent.children += 1
            parent.near_children += place in MEMORY

    def _copy(self, entry: Entry, place: Place) -> Copy:
        copy = entry.at(place)
        assert copy is not None, "there is such a copy"
        return copy

    def _shelf(self, entry: Entry, place: Place) -> Shelf:
        return self.gpus.where(entry.key) if place is Place.GPU else self.shelves[place.tier]

    def _seats(self, entry: Entry, place: Place) -> Part:
        return self._shelf(entry, place).parts[place][entry.namespace]

    def _parent(self, entry: Entry) -> Entry | None:
        return None if entry.parent is None else self.entries.get(entry.parent)

    def use(self, key: RecordKey) -> None:
        """Count a use of a block, in every place."""
        for part, copy in self._listed(key):
            part.use(copy)

    def renew(self, key: RecordKey) -> None:
        """Make a block the youngest of its like in every place; an unknown one is ignored."""
        for part, copy in self._listed(key):
            part.renew(copy)

    def _listed(self, key: RecordKey) -> Iterator[tuple[Part, Copy]]:
        entry = self.entries.get(key)
        for place in Place if entry else ():
            if entry and (copy := entry.at(place)) and copy.state is State.READY:
                yield self._seats(entry, place), copy

    def begin(self, entry: Entry, transfer: Transfer, need: int, *, lossless: bool = False) -> None:
        """Reserve `need` bytes in the target and start the move."""
        self._fill(entry, transfer.target, need)
        self.transfers[entry.key] = transfer
        self._leaves(entry, transfer, 1)
        after = self.lineage.after(entry.key)
        device = self._device(entry, transfer.source, transfer.target)
        self.actions.append(Move(entry.key, transfer.source, transfer.target, after, lossless, device))

    def _device(self, entry: Entry, *places: Place) -> GpuName | None:
        return self.gpus.where(entry.key).device if Place.GPU in places else None

    def end(self, entry: Entry) -> Transfer:
        """Note that the move of a block has ended, either way."""
        transfer = self.transfers.pop(entry.key)
        self._leaves(entry, transfer, -1)
        return transfer

    def _leaves(self, entry: Entry, transfer: Transfer, sign: int) -> None:
        """Count the bytes of a source that leaves, and with it those of a target in the same tier."""
        tier = transfer.source.tier
        for place in (transfer.source, transfer.target) if transfer.leaving else ():
            if place.tier is tier:
                self.shelves[tier].leave(entry.namespace, sign * self._copy(entry, place).nbytes)

    def drop(self, entry: Entry, place: Place) -> None:
        """Let a copy go; the bytes of one that is read stay until its last reader is done."""
        copy = self._copy(entry, place)
        if copy.state is State.READY:
            self._seats(entry, place).discard(copy)
            self._one_child_less(entry, place)
        copy.state = State.DROPPING
        self._shelf(entry, place).drop(entry.namespace, copy.nbytes)
        if not self.pins.at(entry.key, place):
            self.actions.append(Drop(entry.key, place, self._device(entry, place)))

    def _one_child_less(self, entry: Entry, place: Place) -> None:
        parent = self._parent(entry)
        if parent is None:
            return
        parent.children -= 1
        parent.near_children -= place in MEMORY
        for above in Place:
            if parent.ready(above) and not parent.continued(above):
                part = self._seats(parent, above)
                if parent.key in part.held:
                    part.release(parent.key)

    def lose(self, entry: Entry, place: Place, reason: Reason) -> None:
        """Let a copy go, and say so if it was the last one that kept the block."""
        self.drop(entry, place)
        if not entry.kept():
            self.actions.append(Lost(entry.key, entry.namespace, reason))
            if entry.ready(Place.GPU) and entry.key not in self.transfers:
                self.drop(entry, Place.GPU)

    def unpin(self, key: RecordKey, place: Place) -> None:
        """Note that a reader of a copy is done."""
        entry = self.entries[key]
        self.pins.give_back(key, place)
        if not self.pins.at(key, place) and self._copy(entry, place).state is State.DROPPING:
            self.actions.append(Drop(key, place, self._device(entry, place)))
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """Drop what is not to be kept, if nobody uses it now."""
        key = entry.key
        if key in self.transfers:
            return
        if entry.ready(Place.GPU) and not (entry.kept() and self.gpus.at_home(key, entry.namespace)):
            self.drop(entry, Place.GPU)
        if key in self.pins:
            return
        if key in self.doomed:
            for place in Place if key not in self.leases else ():
                if entry.ready(place):
                    self.drop(entry, place)
        elif (leaves := self.outgoing.get(key)) and entry.kept(without=leaves):
            for place in leaves:
                if entry.ready(place):
                    self.drop(entry, place)

    def dropped(self, entry: Entry, place: Place) -> None:
        """Note that a copy is gone; a block without copies is forgotten."""
        copy, shelf, key = self._copy(entry, place), self._shelf(entry, place), entry.key
        entry.put(place, None)
        shelf.book(entry.namespace, -copy.nbytes)
        shelf.drop(entry.namespace, -copy.nbytes)
        if place is Place.GPU:
            self.gpus.leave(key)
        if not any(entry.at(left) for left in self.outgoing.get(key, ())):
            self.outgoing.pop(key, None)
        if not entry.copies:
            del self.entries[key]
            self.superseding.pop(key, None)
            self.doomed.discard(key)
            self.failed.discard(key)
            self.refused.discard(key)
            self.lineage.remove(entry)

    def irreplaceable(self, entry: Entry, place: Place) -> bool:
        """Tell whether a lease holds a block that would be lost without its copy in `place`."""
        return entry.key in self.leases and not entry.kept(without=(place,))
