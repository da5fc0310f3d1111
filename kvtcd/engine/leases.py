"""Leases: blocks stay somewhere for a while, because a client says that it will come back for them.

A lease ends when it is given back, when its time is over, or when its namespace is purged. A block that is
deleted meanwhile is served no more, but goes only then. What all leases hold is bounded by the catalog, what
those of one tenant hold is bounded here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvtcd.core import events as ev
from kvtcd.core.errors import Busy, NotFound
from kvtcd.core.events import Reason
from kvtcd.core.keys import RecordKey
from kvtcd.core.matches import LeaseInfo
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.metrics import Metrics

COUNT = 1024
"""Leases of one tenant."""
SHARE = 0.25
"""Share of all tiers that the leases of one tenant may hold, by raw bytes."""


@dataclass(frozen=True, slots=True)
class _Held:
    tenant: str
    keys: tuple[RecordKey, ...]
    namespaces: frozenset[int]
    nbytes: int
    timer: asyncio.TimerHandle


class Leases:
    """All leases of one daemon. All methods belong to the loop.

    Args:
        driver: owns the catalog.
        metrics: told how many there are.
    """

    def __init__(self, driver: Driver, metrics: Metrics) -> None:
        self._driver, self._metrics = driver, metrics
        self._held: dict[str, _Held] = {}
        self._of: dict[str, dict[str, int]] = {}
        """Bytes of each lease of each tenant."""

    async def take(
        self, tenant: str, keys: Sequence[RecordKey], seconds: float, deadline: float
    ) -> LeaseInfo:
        """Keep blocks for a while.

        Args:
            tenant: whose they are.
            keys: of the blocks; all of them or none is leased.
            seconds: how long at most.
            deadline: loop time to give up at.

        Raises:
            NotFound: one of them is not here.
            Busy: leases hold as much as they may already.
        """
        wanted = tuple(dict.fromkeys(keys))
        entries = self._driver.catalog.residents.entries
        if not all(self._driver.catalog.tiers(key) for key in wanted):
            raise NotFound
        nbytes = sum(entries[key].raw_bytes for key in wanted)
        namespaces = frozenset(entries[key].namespace for key in wanted)
        own = self._of.setdefault(tenant, {})
        if len(own) >= COUNT or sum(own.values()) + nbytes > self._most():
            raise Busy("the leases of this user")
        lease_id = secrets.token_hex(16)
        own[lease_id] = nbytes  # booked before it is asked for, so that two at once are not over the bound
        try:
            request = Request(lambda ticket: ev.Lease(ticket, wanted), undo=ev.Unlease(wanted))
            reason = await self._driver.ask(request, deadline)
        except BaseException:
            self._forget(tenant, lease_id)
            raise
        if reason is not None:
            self._forget(tenant, lease_id)
            if reason is Reason.NOT_FOUND:
                raise NotFound
            raise Busy("the room that leases may hold")
        timer = asyncio.get_running_loop().call_later(seconds, self._end, lease_id)
        self._held[lease_id] = _Held(tenant, wanted, namespaces, nbytes, timer)
        self._metrics.leases.set(len(self._held))
        return LeaseInfo(lease_id, seconds, len(wanted))

    def give_back(self, tenant: str, lease_id: str) -> None:
        """End a lease.

        Raises:
            NotFound: this tenant has none of that id, or it has ended.
        """
        held = self._held.get(lease_id)
        if held is None or held.tenant != tenant:
            raise NotFound("lease")
        self._end(lease_id)

    def purge(self, namespace: int) -> None:
        """End the leases on blocks of a namespace that is about to go."""
        for lease_id, held in list(self._held.items()):
            if namespace in held.namespaces:
                self._end(lease_id)

    def close(self) -> None:
        """End all leases."""
        for lease_id in list(self._held):
            self._end(lease_id)

    def _end(self, lease_id: str) -> None:
        held = self._held.pop(lease_id)
        held.timer.cancel()
        self._forget(held.tenant, lease_id)
        self._metrics.leases.set(len(self._held))
        self._driver.tell(ev.Unlease(held.keys))

    def _forget(self, tenant: str, lease_id: str) -> None:
        del self._of[tenant][lease_id]
        if not self._of[tenant]:
            del self._of[tenant]

    def _most(self) -> float:
        return SHARE * sum(shelf.capacity for shelf in self._driver.catalog.residents.shelves.values())
