"""Memory that clients share with the daemon, and what bounds it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvtcd.api.device_region import DeviceRegion
from kvtcd.api.limits import Limits
from kvtcd.api.region import HostRegion, Part, Region
from kvtcd.core.device_errors import DeviceFailed, DeviceRegionsOff, DeviceUnshared
from kvtcd.core.device_regions import DeviceOffer
from kvtcd.core.errors import Busy, KvtcdError, NotFound, TooLarge
from kvtcd.core.problem import kind_of
from kvtcd.core.regions import REGION, Grant, Span
from kvtcd.cuda.imports import Imports
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics

_log = logging.getLogger(__name__)


class Regions:
    """The regions of all tenants.

    Args:
        limits: regions of one tenant at once, and their bytes. Of host memory, pages that only the daemon
            has touched count as its own.
        metrics: told how many there are.
        devices: opens memory of GPUs; None: none is opened.
    """

    def __init__(self, limits: Limits, metrics: Metrics, devices: Imports | None = None) -> None:
        self._metrics, self._devices = metrics, devices
        self._count = limits.regions
        self._most = {HostRegion.kind: limits.region_bytes, DeviceRegion.kind: limits.device_region_bytes}
        self._regions: dict[str, tuple[str, Region]] = {}
        self._drops: dict[str, tuple[str, Callable[[], None]]] = {}
        """The GPU of each region on one, and what to call when that fails."""
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[tuple[str, str]] = Counter()
        self._faults: set[str] = set()
        """GPUs that have failed."""
        self._closing: set[asyncio.Task[None]] = set()
        self._lane = Lane("regions")
        self._device_lane = Lane("device-regions")
        self.lanes = (self._lane, self._device_lane) if devices else (self._lane,)
        for kind in self._most:
            metrics.regions.labels(kind).set(0)
            metrics.region_bytes.labels(kind).set(0)

    @property
    def nbytes(self) -> int:
        """The size of all of them together."""
        return self._sizes.total()

    def add(self, tenant: str, fd: int) -> Grant:
        """Map a memfd; say under which id its tenant can name it.

        Raises:
            Busy: the tenant has as many as it may.
            BadRequest, TooLarge: see `HostRegion`.
        """
        with self._refusals(HostRegion.kind):
            self._admit(tenant, HostRegion.kind, 0)
            left = self._most[HostRegion.kind] - self._sizes[tenant, HostRegion.kind]
            region = HostRegion(fd, left, self._lane)
            self._take(tenant, region.kind, region.nbytes)
            return self._granted(tenant, region)

    async def open(self, tenant: str, offer: DeviceOffer, drop: Callable[[], None]) -> Grant:
        """Open memory of a GPU; say under which id its tenant can name it.

        Args:
            tenant: whose it is.
            offer: what he says of it.
            drop: called when it can be of no more use; it has to remove it.

        Raises:
            Busy: the tenant has as many as it may.
            TooLarge: it is over the limit.
            DeviceUnshared, BadRequest: see `Imports.open`.
        """
        kind = DeviceRegion.kind
        with self._refusals(kind):
            if self._devices is None:
                raise DeviceRegionsOff
            self._admit(tenant, kind, offer.nbytes)
            self._take(tenant, kind, offer.nbytes)  # meanwhile, so that others find less room
            try:
                memory = await self._device_lane.run(self._devices.open, tenant, offer)
            except BaseException as error:
                self._give_back(tenant, kind, offer.nbytes)
                if isinstance(error, DeviceFailed):
                    self._failed(error)
                raise
            name = secrets.token_hex(16)
            self._drops[name] = memory.uuid, drop
            region = DeviceRegion(self._devices, memory, self._device_lane, partial(self._broken, name))
            return self._granted(tenant, region, name)

    @contextmanager
    def _refusals(self, kind: str) -> Iterator[None]:
        """Count what is refused meanwhile."""
        try:
            yield
        except KvtcdError as error:
            shown = kind_of(error)
            self._metrics.unshared.labels(kind, shown.name if shown else "internal").inc()
            raise

    def _admit(self, tenant: str, kind: str, nbytes: int) -> None:
        if self._counts[tenant] >= self._count:
            raise Busy("the number of regions")
        if nbytes > (left := self._most[kind] - self._sizes[tenant, kind]):
            raise TooLarge("region", nbytes, left)

    def _take(self, tenant: str, kind: str, nbytes: int) -> None:
        self._counts[tenant] += 1
        self._sizes[tenant, kind] += nbytes

    def _give_back(self, tenant: str, kind: str, nbytes: int) -> None:
        self._counts[tenant] -= 1
        self._sizes[tenant, kind] -= nbytes
        if not self._counts[tenant]:
            del self._counts[tenant]
        if not self._sizes[tenant, kind]:
            del self._sizes[tenant, kind]

    def _granted(self, tenant: str, region: Region, name: str | None = None) -> Grant:
        grant = Grant(name or secrets.token_hex(16), region.nbytes)
        self._regions[grant.region] = tenant, region
        self._metrics.regions.labels(region.kind).inc()
        self._metrics.region_bytes.labels(region.kind).inc(region.nbytes)
        return grant

    def remove(self, name: str, idle: Callable[[], None]) -> None:
        """Forget a region: no copy of it begins any more. `idle` is called once it is let go of."""
        tenant, region = self._regions.pop(name)
        self._drops.pop(name, None)
        self._give_back(tenant, region.kind, region.nbytes)
        self._metrics.regions.labels(region.kind).dec()
        self._metrics.region_bytes.labels(region.kind).dec(region.nbytes)
        region.end(partial(self._close, region, idle))

    def _close(self, region: Region, idle: Callable[[], None]) -> None:
        async def close() -> None:
            try:
                await region.release()
            finally:
                idle()

        closing = asyncio.ensure_future(close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _broken(self, name: str, error: DeviceUnshared) -> None:
        if isinstance(error, DeviceFailed):
            self._failed(error)
        elif name in self._drops:
            _log.warning("a region on a GPU is dropped: %s", error)
            _, drop = self._drops[name]
            drop()

    def _failed(self, error: DeviceFailed) -> None:
        """Drop every region on a GPU that has failed."""
        dropped = [drop for uuid, drop in self._drops.values() if uuid == error.uuid]
        if error.uuid not in self._faults:
            self._faults.add(error.uuid)
            self._metrics.devices_failed.inc()
            _log.error("%d regions are dropped: %s", len(dropped), error)
        for drop in dropped:
            drop()

    def part(self, tenant: str, name: str, span: Span) -> Part:
        """Return a part of a region of a tenant.

        Raises:
            NotFound: it has none of that id, or it has ended.
            BadRequest: the part is not all in it.
        """
        owner, region = self._regions.get(name, (None, None))
        if region is None or owner != tenant:
            raise NotFound(REGION)
        return region.part(span)

    async def close(self) -> None:
        """Wait for copies, let go of all that is removed, and end."""
        while self._closing:
            await asyncio.wait(self._closing)
        if self._devices:
            await self._device_lane.run(self._devices.shut)
        for lane in (self._lane, self._device_lane):
            await lane.close()
