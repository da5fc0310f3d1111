"""What is stored at all."""

from __future__ import annotations

from collections.abc import Callable

from kvtcd.core.events import Put
from kvtcd.core.place import Place, Tier
from kvtcd.core.replacement import Block
from kvtcd.core.residency import Residents
from kvtcd.core.shelf import Shelf


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
    host = residents.shelves[Tier.HOST]
    need = host.footprint(put.nbytes)
    if residents.on_disk(put.namespace):
        disk = residents.shelves[Tier.DISK]
        packed = disk.footprint(bound(put.nbytes))
        if packed <= disk.room(put.namespace):
            # What the disk has no room for may still live on a host that has; it is not copied behind then.
            spare = not any(account.full(need) for account in host.accounts(put.namespace))
            return spare or welcome(disk, put.namespace, put, packed)
    full = any(account.shortfall(need) for account in host.accounts(put.namespace))
    return not full or host.admits(put.namespace, put, Place.HOST)


def welcome(disk: Shelf, namespace: int, block: Block, need: int) -> bool:
    """Tell whether the disk has room for `need` bytes of a block, or worse ones to go for it."""
    full = any(account.full(need) for account in disk.accounts(namespace))
    return not full or disk.admits(namespace, block, Place.DISK)
