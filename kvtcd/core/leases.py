"""How much may be leased: what is promised to stay must leave room for what is new."""

from __future__ import annotations

from collections import Counter

from kvtcd.core.events import Reason
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Tier
from kvtcd.core.residency import Residents

SHARE = 0.5
"""Share of a tier that leases may hold, by raw bytes."""


class Leases:
    """Promises that blocks stay, counted against the last tier that each block may be in.

    Args:
        residents: who is where.
    """

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._held: Counter[Tier] = Counter()
        self._booked: dict[RecordKey, tuple[Tier, int]] = {}

    def take(self, keys: tuple[RecordKey, ...]) -> Reason | None:
        """Lease all of these blocks, or say why none of them is."""
        residents = self._residents
        needs: Counter[Tier] = Counter()
        for key in set(keys):
            if not residents.places(key):
                return Reason.NOT_FOUND
            if key not in self._booked:
                entry = residents.entries[key]
                needs[self._last(key)] += entry.raw_bytes
        for tier, need in needs.items():
            if self._held[tier] + need > SHARE * residents.shelves[tier].capacity:
                return Reason.PINNED
        for key in keys:
            residents.leases[key] += 1
            if key not in self._booked:
                tier, nbytes = self._booked[key] = self._last(key), residents.entries[key].raw_bytes
                self._held[tier] += nbytes
        return None

    def give_back(self, keys: tuple[RecordKey, ...]) -> None:
        """End a lease; those blocks that were lost meanwhile (damaged) are only forgotten."""
        residents = self._residents
        for key in keys:
            residents.leases[key] -= 1
            if residents.leases[key] <= 0:
                del residents.leases[key]
                tier, nbytes = self._booked.pop(key)
                self._held[tier] -= nbytes
                if entry := residents.entries.get(key):
                    residents.let_go(entry)

    def _last(self, key: RecordKey) -> Tier:
        return Tier.DISK if self._residents.on_disk(self._residents.entries[key]) else Tier.HOST
