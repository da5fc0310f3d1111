"""The daemon at one moment, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from kvtcd.core.devices import GpuName
from kvtcd.core.message import INLINE, SPARSE, Answer
from kvtcd.core.messages import Count
from kvtcd.core.place import Form, Place, Tier
from kvtcd.core.shelf import Shelf
from kvtcd.engine.remote.stats import RemoteStats
from kvtcd.engine.tally import Counts, PlaceCounts


@dataclass(frozen=True, slots=True)
class FormStats(Answer):
    """Copies in one place; see `PlaceCounts`."""

    blocks: Count
    bytes: Count
    raw_bytes: Count
    hits: Count
    promotions: Count
    demotions: Count
    dropped: dict[str, Count]

    @classmethod
    def of(cls, counts: PlaceCounts) -> FormStats:
        """Return what was counted."""
        return cls(
            counts.blocks, counts.bytes, counts.raw_bytes, counts.hits, counts.promotions, counts.demotions,
            dict(sorted(counts.dropped.items())),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forms(Answer):
    """What was counted in a tier, for each form that its copies have."""

    raw: Annotated[FormStats | None, SPARSE]
    packed: Annotated[FormStats | None, SPARSE]

    @classmethod
    def of(cls, counts: Counts, tier: Tier) -> Forms:
        """Return what was counted in one tier."""
        found = {place.form: FormStats.of(counts.places[place]) for place in Place if place.tier is tier}
        return cls(found.get(Form.RAW), found.get(Form.PACKED))


@dataclass(frozen=True, slots=True)
class DeviceStats(Answer):
    """One GPU that holds blocks.

    Attributes:
        capacity: bytes that it may take.
        used: bytes taken, those of copies that are filling or going included.
        blocks: copies that can be read from it.
    """

    capacity: Count
    used: Count
    blocks: Count

    @classmethod
    def of(cls, shelf: Shelf) -> DeviceStats:
        """Return what holds now."""
        blocks = sum(part.blocks for parts in shelf.parts.values() for part in parts.values())
        return cls(shelf.capacity, shelf.whole.used, blocks)


@dataclass(frozen=True, slots=True)
class TierStats(Answer):
    """One tier.

    Attributes:
        capacity: bytes that it may take, on all devices together.
        withheld: those of them that a device which is full does not hold.
        used: bytes taken, those of copies that are filling or going included.
        devices: each GPU by itself; not there for other tiers.
    """

    capacity: Count
    withheld: Count
    used: Count
    forms: Annotated[Forms, INLINE]
    devices: Annotated[dict[GpuName, DeviceStats] | None, SPARSE] = None

    @classmethod
    def of(cls, counts: Counts, tier: Tier, shelves: Sequence[Shelf]) -> TierStats:
        """Return what holds now.

        Args:
            counts: of all namespaces.
            tier: which.
            shelves: of it.
        """
        return cls(
            sum(shelf.capacity for shelf in shelves), sum(shelf.withheld for shelf in shelves),
            sum(shelf.whole.used for shelf in shelves), Forms.of(counts, tier),
            {shelf.device: DeviceStats.of(shelf) for shelf in shelves if shelf.device} or None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamespaceStats(Answer):
    """What was counted for one namespace, or for some together; see `Counts`."""

    misses: Count
    fetched: Count
    tiers: dict[str, Forms]

    @classmethod
    def of(cls, counts: Counts, tiers: Iterable[Tier]) -> NamespaceStats:
        """Return what was counted in the tiers that the daemon has."""
        return cls(counts.misses, counts.fetched, {str(tier): Forms.of(counts, tier) for tier in tiers})


@dataclass(frozen=True, slots=True)
class Stats(Answer):
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
        fetched: reads for which a block came from the store that is shared with other daemons.
        degraded: what is not as it should be, as `/readyz` names it, and how often; empty if all is well.
        damaged: records that failed their checks since the start, by the fault; none was served.
        remote: the tier that is shared with other daemons; not there without one.
        own: what was counted for each namespace of one tenant, by name.
    """

    boot_id: str
    uptime_s: float
    blocks: Count
    waiting: Count
    moving: Count
    demoting: Count
    tiers: dict[str, TierStats]
    namespaces: Count
    misses: Count
    fetched: Count
    degraded: dict[str, Count]
    damaged: dict[str, Count]
    remote: Annotated[RemoteStats | None, SPARSE]
    own: dict[str, NamespaceStats]


@dataclass(frozen=True, slots=True)
class TenantStats(Answer):
    """One tenant.

    Attributes:
        tenant: who he is.
        namespaces: their names.
        stats: of these, all together.
    """

    tenant: str
    namespaces: tuple[str, ...]
    stats: Annotated[NamespaceStats, INLINE]


@dataclass(frozen=True, slots=True)
class Tenants(Answer):
    """What each tenant has and found."""

    tenants: tuple[TenantStats, ...]
