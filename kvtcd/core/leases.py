"""How much may be leased: what is promised to stay must leave room for what is new."""

from __future__ import annotations

from collections import Counter

from kvtcd.core.account import Account
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Tier
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents

SHARE = 0.5
"""Share that leases may hold, by raw bytes, of a tier and of what a tenant and a namespace may have of it."""


class Leases:
    """Promises that blocks stay, counted against the last tier that each block may be in.

    Args:
        residents: who is where.
    """

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._held: Counter[Account] = Counter()
        self._booked: dict[RecordKey, tuple[tuple[Account, ...], int]] = {}

    def take(self, keys: tuple[RecordKey, ...]) -> Reason | None:
        """Lease all of these blocks, or say why none of them is."""
        residents = self._residents
        needs: Counter[Account] = Counter()
        for key in set(keys):
            if not residents.places(key):
                return Reason.NOT_FOUND
            if key not in self._booked:
                needs.update(dict.fromkeys(self._accounts(key), residents.entries[key].raw_bytes))
        for account, need in needs.items():
            if self._held[account] + need > SHARE * account.capacity:
                return Reason.PINNED
        for key in keys:
            residents.leases[key] += 1
            if key not in self._booked:
                accounts, nbytes = self._booked[key] = self._accounts(key), residents.entries[key].raw_bytes
                self._held.update(dict.fromkeys(accounts, nbytes))
        return None

    def give_back(self, keys: tuple[RecordKey, ...]) -> None:
        """End a lease; those blocks that were lost meanwhile (damaged) are only forgotten."""
        residents = self._residents
        for key in keys:
            residents.leases[key] -= 1
            if residents.leases[key] <= 0:
                del residents.leases[key]
                accounts, nbytes = self._booked.pop(key)
                self._held -= Counter(dict.fromkeys(accounts, nbytes))
                if entry := residents.entries.get(key):
                    residents.let_go(entry)

    def _accounts(self, key: RecordKey) -> tuple[Account, ...]:
        residents, entry = self._residents, self._residents.entries[key]
        last = Tier.DISK if residents.on_disk(entry.namespace) else Tier.HOST
        return residents.shelves[last].accounts(entry.namespace)
