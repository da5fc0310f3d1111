"""Which copies make room: the coldest that nobody uses, and of a prefix its end before its beginning."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvtcd.core.account import Account
from kvtcd.core.entry import Entry
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place
from kvtcd.core.replacement import Seat
from kvtcd.core.residency import Residents
from kvtcd.core.shelf import Part, Shelf

MOST = 16
"""Blocks that one search names."""


def victims(
    residents: Residents,
    shelf: Shelf,
    place: Place,
    account: Account,
    excess: int,
    *,
    spared: Callable[[Entry], bool] = lambda _: False,
    packing: bool = True,
    without: frozenset[int] = frozenset(),
) -> list[Entry]:
    """Return blocks whose copies in `place` free `excess` bytes of an account, or as many as there are now.

    At most `MOST` of them: what is done with each ends in an event, and so in another search.

    Each namespace names its own coldest; of those, the one that was idle longest goes first.

    A copy that others continue is passed over and held until they have gone: each holding is paid for by a
    child that goes or by a use, so the search takes constant time, amortised. Only when there is no leaf at
    all, and none to come, the copies that are held serve too (children on the host alone may hold all of the
    disk). Packing is no going: the raw copies of blocks that are packed in place go without regard to leaves.

    Args:
        residents: who is where.
        shelf: the tier, or the GPU.
        place: where from.
        account: whose namespaces.
        excess: bytes.
        spared: blocks that may not be chosen.
        packing: raw copies that can be packed in place will be.
        without: namespaces that lose nothing now.
    """
    if excess <= 0:
        return []
    chosen: list[Entry] = []
    namespaces = account.namespaces - without
    for entry in _Search(residents, shelf, place, account, namespaces, spared=spared, packing=packing):
        chosen.append(entry)
        excess -= entry.copies[place].nbytes
        if excess <= 0 or len(chosen) == MOST:
            break
    return chosen


class _Search:
    def __init__(
        self,
        residents: Residents,
        shelf: Shelf,
        place: Place,
        account: Account,
        namespaces: set[int],
        *,
        spared: Callable[[Entry], bool],
        packing: bool,
    ) -> None:
        self._residents, self._place, self._spared = residents, place, spared
        self._packing = packing and place is Place.HOST
        self._leaving = account.leaving + account.dropping > 0
        self._by_namespace = parts = shelf.parts[place]
        named = (parts.get(namespace) for namespace in namespaces)
        self._parts = [part for part in named if part is not None and part.blocks]
        self._gone: dict[RecordKey, int] = {}
        """How many copies that continue a block are among those found."""

    def __iter__(self) -> Iterator[Entry]:
        self._name_again()
        entries, waiting = self._residents.entries, self._leaving
        for part, seat in _idle_longest(self._parts):
            entry = entries[seat.block.key]
            if self._busy(entry):
                waiting = True
            elif self._leaf_wise(entry) and self._continued(entry):
                part.hold(seat)
            else:
                waiting = True
                yield from self._upwards(entry)
        if not waiting:
            held = (entries[key] for part in self._parts for key in part.held)
            yield from [entry for entry in held if not self._busy(entry)]

    def _name_again(self) -> None:
        """Name what a search passed over for what continues it: that is no reason not to pack it."""
        for part in self._parts if self._packing else ():
            for key in reversed([*islice(part.held, MOST)]):
                if not self._leaf_wise(self._residents.entries[key]):
                    part.release(key)

    def _upwards(self, entry: Entry) -> Iterator[Entry]:
        """Yield a leaf, then those above it that came to their turn before and thereby become leaves."""
        found: Entry | None = entry
        while found is not None:
            yield found
            parent = None if found.parent is None else self._residents.entries.get(found.parent)
            if parent is None:
                return
            self._gone[parent.key] = self._gone.get(parent.key, 0) + 1
            came = self._held(parent) and not self._busy(parent) and not self._continued(parent)
            found = parent if came else None

    def _held(self, entry: Entry) -> bool:
        part = self._by_namespace.get(entry.namespace)
        return part in self._parts and entry.key in part.held

    def _leaf_wise(self, entry: Entry) -> bool:
        policy = self._residents.rules[entry.namespace].policy
        packed_in_place = self._packing and policy.host.form == "raw-then-packed"
        return policy.evict.leaves_first and self._place is not Place.GPU and not packed_in_place

    def _continued(self, entry: Entry) -> bool:
        return entry.continued(self._place) > self._gone.get(entry.key, 0)

    def _busy(self, entry: Entry) -> bool:
        """Tell whether a copy is read, is moving, or is the one that others are to leave for."""
        residents, key = self._residents, entry.key
        if key in residents.transfers or self._spared(entry):
            return True
        if residents.pins.at(key, self._place):
            return True
        return key in residents.outgoing and self._place not in residents.outgoing[key]


def _idle_longest(parts: Iterable[Part]) -> Iterator[tuple[Part, Seat]]:
    """Merge the orders of several namespaces by idle time. A seat just yielded may be held."""
    heap: list[tuple[int, int, Part, Seat, Iterator[Seat]]] = []
    for number, part in enumerate(parts):
        order = part.order.coldest()
        if (seat := next(order, None)) is not None:
            heap.append((seat.used, number, part, seat, order))
    heapq.heapify(heap)
    while heap:
        _, number, part, seat, order = heap[0]
        yield part, seat
        if (following := next(order, None)) is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.used, number, part, following, order))
