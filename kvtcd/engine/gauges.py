"""Gauges for `/metrics` that nobody keeps up to date: they are read off when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from kvtcd.core.messages import Fault
from kvtcd.core.place import Tier
from kvtcd.engine import drift
from kvtcd.engine.driver import Driver
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.pulse import Worker
from kvtcd.engine.tally import Tally


def show(
    metrics: Metrics, driver: Driver, tally: Tally, workers: Iterable[Worker], namespaces: list[Namespace], *,
    degraded: Mapping[Fault, int],
) -> None:  # fmt: skip
    """Set the gauges to what holds now."""
    residents, total = driver.catalog.residents, tally.total
    for tier, shelves in residents.tiers.items():
        for shelf in shelves:
            metrics.used.labels(tier, shelf.device or "").set(shelf.whole.used)
            metrics.capacity.labels(tier, shelf.device or "").set(shelf.capacity)
        metrics.tier_blocks.labels(tier).set(total.blocks(tier))
    if disk := residents.shelves.get(Tier.DISK):
        metrics.withheld.set(disk.withheld)
    metrics.blocks.set(len(residents.entries))
    metrics.waiting.set(driver.waiting)
    for worker in workers:
        metrics.queue.labels(worker.name).set(worker.pending)
    for fault in get_args(Fault):
        metrics.degraded.labels(fault).set(degraded.get(fault, 0))
    drift.show(namespaces, metrics)
