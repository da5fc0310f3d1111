"""Who goes first in a tier: one class per policy, all of the same shape."""

from __future__ import annotations

from kvtcd.core.policy import Evict
from kvtcd.core.replacement.arc import Arc
from kvtcd.core.replacement.gdsf import Gdsf
from kvtcd.core.replacement.lfu import Lfu
from kvtcd.core.replacement.lru import Lru
from kvtcd.core.replacement.order import Replacement
from kvtcd.core.replacement.s3fifo import S3Fifo
from kvtcd.core.replacement.seat import Block, Seat
from kvtcd.core.sightings import Sightings

__all__ = ["Arc", "Block", "Gdsf", "Lfu", "Lru", "Replacement", "S3Fifo", "Seat", "replacement"]


def replacement(evict: Evict, capacity: int, sightings: Sightings) -> Replacement:
    """Return the order that a policy file asks for.

    Args:
        evict: what it says.
        capacity: bytes of the tier.
        sightings: the catalog's.
    """
    match evict.policy:
        case "lru":
            return Lru()
        case "lfu":
            return Lfu(sightings, evict.half_life)
        case "arc":
            return Arc(capacity)
        case "s3fifo":
            return S3Fifo(capacity)
        case "gdsf":
            return Gdsf(sightings)
