"""The sums of one tier, and who goes first in it."""

from __future__ import annotations

from kvtcd.core.events import Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.policy import DiskTier, HostTier, Policy
from kvtcd.core.replacement import Replacement, replacement
from kvtcd.core.sightings import Sightings


class Shelf:
    """One tier: capacity, what is used, what is about to be free.

    Args:
        capacity: bytes.
        high: share of the capacity above which copies are moved out ahead of need.
        low: share down to which they are.
        order: who goes first.
        granule: bytes that room is given out in.
        leaves_first: no block goes before those that continue it.

    Attributes:
        blocks: READY copies.
        held: those among them that came to their turn while others continue them.
    """

    def __init__(
        self,
        capacity: int,
        high: float,
        low: float,
        order: Replacement,
        *,
        granule: int = 1,
        leaves_first: bool = True,
    ) -> None:
        self.capacity = capacity
        self.high, self.low = int(capacity * high), int(capacity * low)
        self.order, self.leaves_first = order, leaves_first
        self.used = self.leaving = self.blocks = 0
        self.held: dict[RecordKey, None] = {}
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


def shelves(policy: Policy, sightings: Sightings, *, host: int, disk: int, granule: int) -> dict[Tier, Shelf]:
    """Return the tiers that exist, governed by one policy.

    Args:
        policy: the one that matches all.
        sightings: the catalog's.
        host: bytes of the host tier.
        disk: bytes of the disk tier; 0: there is none.
        granule: bytes that host memory is given out in.
    """

    def shelf(capacity: int, marks: HostTier | DiskTier, granule: int) -> Shelf:
        order = replacement(policy.evict, capacity, sightings)
        return Shelf(
            capacity, marks.high, marks.low, order, granule=granule, leaves_first=policy.evict.leaves_first
        )

    tiers = {Tier.HOST: shelf(host, policy.host, granule)}
    if disk:
        tiers[Tier.DISK] = shelf(disk, policy.disk, 1)
    return tiers
