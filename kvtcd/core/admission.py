"""What is stored at all."""

from __future__ import annotations

from kvtcd.core.events import Put, Tier
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room


def admits(put: Put, seen: float, residents: Residents, room: Room) -> bool:
    """Tell whether a block that is not here may enter.

    It must have been seen often enough; sights fade in halves, and half a sight is taken for one. And if the
    tier that it would end in has no room left, it must be worth more than who would go for it.

    Args:
        put: what is offered.
        seen: how often it was seen, this time included.
        residents: who is where.
        room: knows what the block takes on disk.
    """
    if seen + 0.5 < put.on_sight:
        return False
    if put.packable and Tier.DISK in residents.shelves:
        shelf = residents.shelves[Tier.DISK]
        excess = shelf.excess(room.disk_need(put.nbytes))
    else:
        shelf = residents.shelves[Tier.HOST]
        excess = shelf.shortfall(shelf.footprint(put.nbytes))
    return not excess or shelf.order.admits(put)
