"""What is stored at all."""

from __future__ import annotations

from collections.abc import Callable

from kvtcd.core.events import Put
from kvtcd.core.place import Place, Tier
from kvtcd.core.residency import Residents


def admits(put: Put, seen: float, residents: Residents, bound: Callable[[int], int]) -> bool:
    """Tell whether a block that is not here may enter.

    It must have been seen often enough; sights fade in halves, and half a sight is taken for one. And if the
    tier that it would end in has no room left, it must be worth more than who would go for it.

    Args:
        put: what is offered.
        seen: how often it was seen, this time included.
        residents: who is where.
        bound: largest packed size, in bytes of the disk tier, of a block of so many raw bytes.
    """
    if seen + 0.5 < residents.rules[put.namespace].policy.admit.on_sight:
        return False
    rules, disk = residents.rules[put.namespace], residents.shelves.get(Tier.DISK)
    if rules.on_disk and disk and disk.footprint(bound(put.nbytes)) <= disk.room(put.namespace):
        shelf, place = disk, Place.DISK
        need = shelf.footprint(bound(put.nbytes))
        full = any(account.full(need) for account in shelf.accounts(put.namespace))
    else:
        shelf, place = residents.shelves[Tier.HOST], Place.HOST
        need = shelf.footprint(put.nbytes)
        full = any(account.shortfall(need) for account in shelf.accounts(put.namespace))
    return not full or shelf.admits(put, place)
