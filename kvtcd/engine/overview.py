"""The daemon in numbers, for those who look at it: now, over the last hour, and by tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kvtcd.core.messages import DiskState, Fault
from kvtcd.core.place import Tier
from kvtcd.engine.driver import Driver
from kvtcd.engine.history import EVERY_S, History, Sample
from kvtcd.engine.namespaces import Registry
from kvtcd.engine.remote.tier import RemoteTier
from kvtcd.engine.stats import NamespaceStats, Stats, TenantStats, TierStats
from kvtcd.engine.tally import Counts, Tally

LAG_EVERY_S = 1.0
"""Seconds between two looks at how late the loop is."""


class Overview:
    """Answers what is where and what was found. All methods belong to the loop.

    Args:
        boot_id: of this daemon.
        driver: its catalog is only asked.
        registry: of namespaces.
        tally: what was counted for each.
        faults: says what is wrong with environments of tenants, and how many.
        damaged: says how many records failed their checks, by the fault.
        remote: the remote tier, if there is one.

    Attributes:
        history: of the sums over all tenants.
    """

    def __init__(
        self, boot_id: str, driver: Driver, registry: Registry, tally: Tally, *,
        faults: Callable[[], Mapping[Fault, int]], damaged: Callable[[], Mapping[str, int]],
        remote: RemoteTier | None = None,
    ) -> None:  # fmt: skip
        self._remote, self._faults, self._damaged = remote, faults, damaged
        self._boot_id, self._driver, self._registry, self._tally = boot_id, driver, registry, tally
        self._started = time.monotonic()
        self.history = History()

    @property
    def _uptime_s(self) -> float:
        return round(time.monotonic() - self._started, 3)

    @property
    def degraded(self) -> dict[Fault, int]:
        """What is not as it should be while everything else is served, and how often."""
        found = dict(self._faults())
        if self._remote and self._remote.away:
            found["remote-away"] = 1
        if self._remote and self._remote.refusing:
            found["remote-refuses"] = 1
        return found

    @property
    def disk(self) -> DiskState:
        """Whether devices hold what they are meant to: one that is full holds less for a while."""
        disk = self._driver.catalog.residents.shelves.get(Tier.DISK)
        return "off" if disk is None else "full" if disk.withheld else "ok"

    async def watch(self, late: Callable[[float], object]) -> None:
        """Add to the history, without end; tell `late` each second by how many seconds the loop is late."""
        while True:
            tiers = self._driver.catalog.residents.tiers
            self.history.add(Sample.of(self._uptime_s, self._tally.total, tiers))
            until = time.monotonic() + EVERY_S
            while (left := until - (begun := time.monotonic())) > 0:
                await asyncio.sleep(nap := min(LAG_EVERY_S, left))
                late(max(0.0, time.monotonic() - begun - nap))

    def stats(self, tenant: str) -> Stats:
        """Return the daemon at this moment, as far as it concerns a tenant."""
        catalog = self._driver.catalog
        counts, tiers = self._tally.total, catalog.residents.tiers
        known = self._registry.tenants.get(tenant)
        return Stats(
            boot_id=self._boot_id,
            uptime_s=self._uptime_s,
            blocks=len(catalog.residents.entries),
            waiting=self._driver.waiting,
            moving=len(catalog.residents.transfers),
            demoting=catalog.room.descending,
            tiers={str(tier): TierStats.of(counts, tier, shelves) for tier, shelves in tiers.items()},
            namespaces=sum(not namespace.trial for namespace in self._registry.all()),
            misses=counts.misses,
            fetched=counts.fetched,
            degraded={str(fault): count for fault, count in self.degraded.items()},
            damaged=dict(self._damaged()),
            remote=self._remote.stats() if self._remote else None,
            own={
                ns.name: NamespaceStats.of(self._tally.of(ns.number), tiers)
                for ns in (known.namespaces.values() if known else ())
                if not ns.trial
            },
        )

    def tenants(self) -> list[TenantStats]:
        """Return what each tenant has, and what he found."""
        tiers = list(self._driver.catalog.residents.tiers)
        found: list[TenantStats] = []
        for name, tenant in self._registry.tenants.items():
            if tenant.guest:
                continue
            counts, own = Counts(), [each for each in tenant.namespaces.values() if not each.trial]
            for namespace in own:
                counts.add(self._tally.of(namespace.number))
            names = tuple(namespace.name for namespace in own)
            found.append(TenantStats(name, names, NamespaceStats.of(counts, tiers)))
        return found
