"""Bounds on what clients may send, hold and wait for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakSet

from aiohttp import web

from kvtcd.core.errors import Busy
from kvtcd.core.messages import MAX_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every bound of the HTTP API.

    Attributes:
        connections: open connections that have sent a request.
        block_bytes: bytes of one block.
        batch_bytes: bytes of one body of frames.
        batch_blocks: blocks or keys in one request.
        json_bytes: bytes of a JSON body.
        token_bytes: bytes of a body of token ids.
        in_flight: bytes of the host tier that all clients hold at once; see `InFlight`.
        tenant_in_flight: the same for one tenant.
        regions: regions of memory that one tenant shares with the daemon.
        region_bytes: size together of those in host memory.
        device_region_bytes: and of those on GPUs.
        operations: operations of one tenant that are remembered or run.
        stall_s: seconds without progress of a body, in or out, before its connection is closed.
        rate: bytes a second that a body must come in with on average, once `grace_s` were spent waiting.
        grace_s: see `rate`.
        deadline_s: seconds for a request that gives no deadline.
        shutdown_s: seconds that requests get to finish when the daemon stops.
    """

    connections: int = 1024
    block_bytes: int = 1 << 30
    batch_bytes: int = 1 << 30
    batch_blocks: int = MAX_BLOCKS
    json_bytes: int = 1 << 20
    token_bytes: int = 4 << 20
    in_flight: int = 1 << 30
    tenant_in_flight: int = 512 << 20
    regions: int = 64
    region_bytes: int = 4 << 30
    device_region_bytes: int = 256 << 30
    operations: int = 64
    stall_s: float = 10.0
    rate: float = 64 << 10
    grace_s: float = 30.0
    deadline_s: float = 30.0
    shutdown_s: float = 20.0


class InFlight:
    """Bytes of the host tier that cannot be evicted because of clients: blocks on their way in or out.

    A request that finds nothing in flight is always let in, so that none is refused for ever.

    Args:
        total: bytes of all tenants.
        per_tenant: bytes of one tenant.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total, self._per_tenant = total, per_tenant
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes in flight now."""
        return self._held.total()

    @contextmanager
    def take(self, tenant: str, nbytes: int) -> Iterator[None]:
        """Hold `nbytes` for a tenant.

        Raises:
            Busy: that would be over a bound.
        """
        if (self.held and self.held + nbytes > self._total) or (
            self._held[tenant] and self._held[tenant] + nbytes > self._per_tenant
        ):
            raise Busy("the transfer budget")
        self._held[tenant] += nbytes
        try:
            yield
        finally:
            self._held[tenant] -= nbytes
            if not self._held[tenant]:
                del self._held[tenant]


class Traffic:
    """Connections that have sent a request, and requests under way; aiohttp bounds neither.

    Args:
        limit: connections at once. Idle ones that never asked for anything are closed by aiohttp.

    Attributes:
        closing: no more requests are let in, and each connection ends with the one that is under way.
    """

    def __init__(self, limit: int) -> None:
        self.closing = False
        self._limit = limit
        self._connections: WeakSet[asyncio.Transport] = WeakSet()
        self._requests = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def admit(self, request: web.Request) -> bool:
        """Tell whether the connection of a request is one of the first `limit`."""
        transport = request.transport
        if transport is None or transport in self._connections:
            return True
        if len(self._connections) >= self._limit:
            gone = next((known for known in self._connections if known.is_closing()), None)
            if gone is None:
                return False
            self._connections.discard(gone)
        self._connections.add(transport)
        return True

    def has_asked(self, connection: asyncio.Transport) -> bool:
        """Tell whether a connection has sent a request, and was admitted."""
        return connection in self._connections

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request while it is handled."""
        self._requests += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._quiet.set()

    async def drain(self, seconds: float) -> None:
        """Let requests end, and connections with them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
