"""Which copies make room: the coldest that nobody uses, and of a prefix its end before its beginning."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.entry import Entry
from kvtcd.core.events import Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.residency import Residents


def victims(residents: Residents, tier: Tier, excess: int) -> list[Entry]:
    """Return blocks whose copies in `tier` free `excess` bytes, or as many as there are now.

    A copy that others continue is passed over and held until they have gone: each holding is paid for by a
    child that goes or by a use, so the search takes constant time, amortised. Only when there is no leaf at
    all, and none to come, the copies that are held serve too (children on the host alone may hold all of the
    disk).
    """
    if excess <= 0:
        return []
    search = _Search(residents, tier)
    chosen: list[Entry] = []
    for entry in search:
        chosen.append(entry)
        excess -= entry.copies[tier].nbytes
        if excess <= 0:
            break
    return chosen


class _Search:
    def __init__(self, residents: Residents, tier: Tier) -> None:
        self._residents, self._tier, self._shelf = residents, tier, residents.shelves[tier]
        self._gone: dict[RecordKey, int] = {}
        """How many copies that continue a block are among those found."""

    def __iter__(self) -> Iterator[Entry]:
        entries, shelf = self._residents.entries, self._shelf
        waiting = shelf.leaving > 0
        for seat in shelf.order.coldest():
            entry = entries[seat.block.key]
            if self._busy(entry):
                waiting = True
            elif shelf.leaves_first and self._continued(entry):
                shelf.order.hold(seat)
                shelf.held[entry.key] = None
            else:
                waiting = True
                yield from self._upwards(entry)
        if not waiting:
            yield from [e for key in shelf.held if not self._busy(e := entries[key])]

    def _upwards(self, entry: Entry) -> Iterator[Entry]:
        """Yield a leaf, then those above it that came to their turn before and thereby become leaves."""
        found: Entry | None = entry
        while found is not None:
            yield found
            parent = None if found.parent is None else self._residents.entries.get(found.parent)
            if parent is None:
                return
            self._gone[parent.key] = self._gone.get(parent.key, 0) + 1
            came = parent.key in self._shelf.held and not self._busy(parent) and not self._continued(parent)
            found = parent if came else None

    def _continued(self, entry: Entry) -> bool:
        return entry.continued(self._tier) > self._gone.get(entry.key, 0)

    def _busy(self, entry: Entry) -> bool:
        """Tell whether a copy is read, is moving, or is the one that the host's is to leave for."""
        if entry.key in self._residents.transfers:
            return True
        return entry.pins > 0 if self._tier is Tier.HOST else entry.evict
