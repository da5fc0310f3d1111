"""Leases: blocks stay somewhere for a while, because a client says that it will come back for them.

A lease ends when it is given back, when its time is over, or when its namespace is purged. A block that is
deleted meanwhile is served no more, but goes only then. What all leases hold is bounded by the catalog, what
those of one tenant hold is bounded here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtcd.core import events as ev
from kvtcd.core.errors import Busy, NotFound
from kvtcd.core.keys import RecordKey
from kvtcd.core.matches import LeaseInfo
from kvtcd.core.reason import Reason
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.metrics import Metrics

COUNT = 1024
"""Leases of one tenant."""
SHARE = 0.25
"""Share of all tiers that the leases of one tenant may hold, by raw bytes; each block counts once."""


@dataclass(frozen=True, slots=True)
class _Held:
    tenant: str
    keys: tuple[RecordKey, ...]
    namespaces: frozenset[int]
    timer: asyncio.TimerHandle


class _Account:
    """What the leases of one tenant hold: how many there are, of which blocks, and the bytes of these."""

    def __init__(self) -> None:
        self.leases = self.nbytes = 0
        self._sizes: dict[RecordKey, int] = {}
        self._leased: Counter[RecordKey] = Counter()

    def more(self, sizes: Mapping[RecordKey, int]) -> int:
        """Return the bytes of those blocks that no lease holds yet."""
        return sum(nbytes for key, nbytes in sizes.items() if key not in self._sizes)

    def book(self, sizes: Mapping[RecordKey, int]) -> None:
        """Count a lease of blocks of these sizes."""
        self.leases += 1
        self.nbytes += self.more(sizes)
        for key, nbytes in sizes.items():
            self._sizes.setdefault(key, nbytes)
            self._leased[key] += 1

    def forget(self, keys: Iterable[RecordKey]) -> None:
        """Count a lease no more."""
        self.leases -= 1
        for key in keys:
            self._leased[key] -= 1
            if not self._leased[key]:
                del self._leased[key]
                self.nbytes -= self._sizes.pop(key)


class Leases:
    """All leases of one daemon. All methods belong to the loop.

    Args:
        driver: owns the catalog.
        metrics: told how many there are.
    """

    def __init__(self, driver: Driver, metrics: Metrics) -> None:
        self._driver, self._metrics = driver, metrics
        self._held: dict[str, _Held] = {}
        self._of: dict[str, _Account] = {}
        """By tenant."""

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
        sizes = {key: entries[key].raw_bytes for key in wanted}
        namespaces = frozenset(entries[key].namespace for key in wanted)
        own = self._of.get(tenant, _Account())
        if own.leases >= COUNT or own.nbytes + own.more(sizes) > self._most():
            raise Busy("the number of leases of this user")
        self._of[tenant] = own
        own.book(sizes)  # before it is asked for, so that two at once are not over the bound
        try:
            request = Request(lambda ticket: ev.Lease(ticket, wanted), undo=lambda _: ev.Unlease(wanted))
            reason = await self._driver.ask(request, deadline)
        except BaseException:
            self._forget(tenant, wanted)
            raise
        if reason is not None:
            self._forget(tenant, wanted)
            if reason is Reason.NOT_FOUND:
                raise NotFound
            raise Busy("the room that leases may hold")
        lease_id = secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(seconds, self._end, lease_id)
        self._held[lease_id] = _Held(tenant, wanted, namespaces, timer)
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
        self._forget(held.tenant, held.keys)
        self._metrics.leases.set(len(self._held))
        self._driver.tell(ev.Unlease(held.keys))

    def _forget(self, tenant: str, keys: Iterable[RecordKey]) -> None:
        self._of[tenant].forget(keys)
        if not self._of[tenant].leases:
            del self._of[tenant]

    def _most(self) -> float:
        return SHARE * sum(
            shelf.capacity for each in self._driver.catalog.residents.tiers.values() for shelf in each
        )
