"""The daemon at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvtcd.core.place import Place, Tier
from kvtcd.engine.tally import Counts, PlaceCounts


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier; `used` are its bytes, those of copies that are filling or going included.

    `withheld` are those of its capacity that a device which is full does not hold.
    """

    capacity: int
    withheld: int
    used: int
    counts: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"capacity": self.capacity, "withheld": self.withheld, "used": self.used, **self.counts}


@dataclass(frozen=True, slots=True)
class Stats:
    """The daemon at one moment.

    Attributes:
        boot_id: another one after every start.
        uptime_s: seconds since then.
        blocks: in any tier.
        waiting: requests that wait.
        demoting: moves down that run.
        tiers: by name.
        namespaces: of all tenants.
        misses: reads of blocks that were nowhere.
        own: what was counted for each namespace of one tenant, by name.
    """

    boot_id: str
    uptime_s: float
    blocks: int
    waiting: int
    demoting: int
    tiers: dict[str, TierStats]
    namespaces: int
    misses: int
    own: dict[str, Counts]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "boot_id": self.boot_id,
            "uptime_s": self.uptime_s,
            "blocks": self.blocks,
            "waiting": self.waiting,
            "demoting": self.demoting,
            "tiers": {name: tier.to_json() for name, tier in self.tiers.items()},
            "namespaces": self.namespaces,
            "misses": self.misses,
            "own": {
                name: {
                    "misses": counts.misses,
                    "tiers": {name: forms(counts, Tier(name)) for name in self.tiers},
                }
                for name, counts in self.own.items()
            },
        }


def forms(counts: Counts, tier: Tier) -> dict[str, object]:
    """Return what was counted in a tier, for each form that its copies have."""
    return {str(place.form): _place(counts.places[place]) for place in Place if place.tier is tier}


def _place(counts: PlaceCounts) -> dict[str, object]:
    return {
        "blocks": counts.blocks,
        "bytes": counts.bytes,
        "hits": counts.hits,
        "promotions": counts.promotions,
        "demotions": counts.demotions,
        "dropped": dict(sorted(counts.dropped.items())),
    }
