"""The daemon at one moment, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
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
        moving: moves that run.
        demoting: those of them that go down.
        tiers: by name.
        namespaces: of all tenants.
        misses: reads of blocks that were nowhere.
        own: what was counted for each namespace of one tenant, by name.
    """

    boot_id: str
    uptime_s: float
    blocks: int
    waiting: int
    moving: int
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
            "moving": self.moving,
            "demoting": self.demoting,
            "tiers": {name: tier.to_json() for name, tier in self.tiers.items()},
            "namespaces": self.namespaces,
            "misses": self.misses,
            "own": {
                name: {"misses": counts.misses, "tiers": _tiers(counts, self.tiers)}
                for name, counts in self.own.items()
            },
        }


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant.

    Attributes:
        name: who he is.
        namespaces: their names.
        counts: of these, all together.
        tiers: that the daemon has.
    """

    name: str
    namespaces: list[str]
    counts: Counts
    tiers: list[Tier]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "tenant": self.name,
            "namespaces": self.namespaces,
            "misses": self.counts.misses,
            "tiers": _tiers(self.counts, self.tiers),
        }


def _tiers(counts: Counts, tiers: Iterable[str]) -> dict[str, object]:
    return {name: forms(counts, Tier(name)) for name in tiers}


def forms(counts: Counts, tier: Tier) -> dict[str, object]:
    """Return what was counted in a tier, for each form that its copies have."""
    return {str(place.form): _place(counts.places[place]) for place in Place if place.tier is tier}


def _place(counts: PlaceCounts) -> dict[str, object]:
    return {
        "blocks": counts.blocks,
        "bytes": counts.bytes,
        "raw_bytes": counts.raw_bytes,
        "hits": counts.hits,
        "promotions": counts.promotions,
        "demotions": counts.demotions,
        "dropped": dict(sorted(counts.dropped.items())),
    }
