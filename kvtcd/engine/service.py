"""The whole daemon for those who do not speak HTTP: namespaces, blocks, and their life cycle."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from kvtcd.core import events as ev
from kvtcd.core.errors import Busy, KvtcdError, NotFound, Stopping
from kvtcd.core.events import Reason
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.messages import BlockMatch, BlockResult
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.matching import Matcher
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Memory
from kvtcd.engine.sessions import Batch, Lease, settle
from kvtcd.engine.stats import Stats, TierStats
from kvtcd.engine.streams import Stream
from kvtcd.engine.tenancy import Tenancy

_log = logging.getLogger(__name__)
TICK = 1.0
"""Seconds between two looks for blocks whose time is over."""
READ_AHEAD = 4
"""Blocks of one request that are fetched before their turn."""


class Service:
    """One daemon's cache. All methods belong to the loop; `deadline` is a time of the loop's clock.

    Args:
        driver: owns the catalog.
        memory: the host tier.
        tenancy: tenants and namespaces.
        lanes: threads that blocks are moved on, closed at the end.
        metrics: shown by `metrics_text`.
    """

    def __init__(
        self, *, driver: Driver, memory: Memory, tenancy: Tenancy, lanes: Sequence[Stream], metrics: Metrics
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self.metrics = metrics
        self.ready = self.draining = False
        self._driver, self._memory, self._tenancy, self._lanes = driver, memory, tenancy, lanes
        self._registry = tenancy.registry
        self._started = time.monotonic()
        self._ticking: asyncio.Task[None] | None = None

    # Life -----------------------------------------------------------------------------------------------

    async def recover(self, tags: Sequence[str]) -> list[str]:
        """Take in what an earlier process left on disk, and be ready; return the tags of no known key.

        Args:
            tags: hex names of the tenants' environments.
        """
        foreign = await self._tenancy.recover(tags)
        if self._tenancy.expiring:
            self._ticking = asyncio.create_task(self._tick(), name="kvtcd-tick")
        self.ready = True
        return foreign

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._driver.tell(ev.Tick())

    async def close(self, deadline: float) -> None:
        """Write to disk what the policies say, let running moves end, close everything.

        Args:
            deadline: what is not on disk by then is lost, and counted.
        """
        self.draining, self.ready = True, False
        if self._ticking:
            self._ticking.cancel()
        for namespace in self._registry.all():
            if namespace.policy.flush == "host":
                try:
                    results = await self._settle_all(namespace, deadline)
                    lost = sum(result.outcome == "dropped" for result in results)
                except KvtcdError as error:
                    _log.warning("not everything of %s was written: %s", namespace.name, error)
                else:
                    if lost:
                        _log.warning("%d blocks of %s were not written", lost, namespace.name)
        await self._driver.idle()
        await self._tenancy.close()
        for lane in self._lanes:
            await lane.close()

    # Namespaces ----------------------------------------------------------------------------------------

    async def register(self, tenant: str, name: str, identity: Identity) -> Namespace:
        """Register a namespace, durably; registering it again is no error.

        Raises:
            IdentityConflict: name and identity are taken, but not together.
            StoreFailed: it could not be made durable.
        """
        return await self._tenancy.register(tenant, name, identity)

    def namespace(self, tenant: str, name: str) -> Namespace:
        """Return a namespace.

        Raises:
            UnknownNamespace: this tenant has none of that name.
        """
        return self._registry.find(tenant, name)

    def namespaces(self, tenant: str) -> list[Namespace]:
        """Return the namespaces of a tenant."""
        known = self._registry.tenants.get(tenant)
        return list(known.namespaces.values()) if known else []

    async def purge(self, tenant: str, name: str) -> int:
        """Remove a namespace and every byte of its blocks, durably; return how many blocks there were.

        Raises:
            UnknownNamespace: there is none of that name.
            StoreFailed: it could not be completed; call it again.
        """
        return await self._tenancy.purge(tenant, name)

    def match(self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes) -> list[BlockMatch]:
        """Say of each key whether it can be served, and from where; this marks nothing as used."""
        return self._matcher(namespace, salt).by_keys(keys)

    def match_tokens(self, namespace: Namespace, tokens: Sequence[int], salt: bytes) -> list[BlockMatch]:
        """Return the longest stored prefix of a token sequence under our own key chain."""
        return self._matcher(namespace, salt).by_tokens(tokens, namespace.identity.block_tokens)

    def _matcher(self, namespace: Namespace, salt: bytes) -> Matcher:
        keys = self._registry.tenants[namespace.tenant].keys
        return Matcher(self._driver.catalog, keys, namespace.digest, salt)

    @asynccontextmanager
    async def batch(self, namespace: Namespace, salt: bytes, deadline: float) -> AsyncIterator[Batch]:
        """Store blocks of one request; what is not committed when the context ends is given back.

        Raises:
            Stopping: no blocks are taken any more.
        """
        if self.draining:
            raise Stopping
        batch = Batch(
            self._driver, self._memory, self._registry, namespace=namespace, salt=salt, deadline=deadline
        )
        try:
            yield batch
        finally:
            batch.abandon()

    @asynccontextmanager
    async def read(
        self, namespace: Namespace, key: EngineKey, salt: bytes, deadline: float
    ) -> AsyncIterator[Lease]:
        """Hold one block in host memory while it is read, bringing it up if need be.

        Raises:
            NotFound: it is not here, or proved to be damaged.
            Busy: it is here, but could not be brought up now.
            DeadlineExceeded: not within the caller's time.
        """
        record_key = self._record_key(namespace, salt, key)
        tiers = self._driver.catalog.tiers(record_key)
        request = Request(lambda ticket: ev.Get(ticket, record_key), undo=ev.Release(record_key))
        reason = await self._driver.ask(request, deadline)
        if reason in (Reason.FAILED, Reason.TOO_LARGE):
            self.metrics.gets.labels(reason).inc()
            raise Busy("the way up from disk")
        if reason is not None:
            self.metrics.gets.labels("nowhere").inc()
            raise NotFound
        self.metrics.gets.labels(tiers[0]).inc()
        entry = self._driver.catalog.residents.entries[record_key]
        try:
            yield Lease(key, entry.raw_bytes, entry.tokens, tiers[0], list(self._memory.pieces(record_key)))
        finally:
            self._driver.tell(ev.Release(record_key))

    async def read_many(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float
    ) -> AsyncGenerator[tuple[EngineKey, Lease | None], None]:
        """Yield each key with its lease, or None for a miss; a lease ends when the next one is asked for.

        A few blocks are brought up ahead of their turn, so that reading and unpacking overlap.
        """

        async def enter(stack: AsyncExitStack, key: EngineKey) -> Lease | None:
            try:
                return await stack.enter_async_context(self.read(namespace, key, salt, deadline))
            except (NotFound, Busy):
                return None

        ahead: deque[tuple[EngineKey, AsyncExitStack, asyncio.Task[Lease | None]]] = deque()
        waiting = iter(keys)
        try:
            while True:
                while len(ahead) < READ_AHEAD and (key := next(waiting, None)) is not None:
                    stack = AsyncExitStack()
                    ahead.append((key, stack, asyncio.create_task(enter(stack, key))))
                if not ahead:
                    break
                key, stack, task = ahead[0]
                yield key, await task
                ahead.popleft()
                await stack.aclose()
            self._driver.tell(ev.Touch(tuple(self._record_key(namespace, salt, key) for key in keys)))
        finally:
            for _, stack, task in ahead:
                task.cancel()
                with suppress(asyncio.CancelledError, KvtcdError):
                    await task
                await stack.aclose()

    async def delete(self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes) -> int:
        """Remove blocks, durably; return how many there were. Readers finish first.

        Raises:
            StoreFailed: a record could not be removed from disk.
        """
        record_keys = [self._record_key(namespace, salt, key) for key in keys]
        known = [key for key in record_keys if self._driver.catalog.tiers(key)]
        await self._tenancy.delete(known, self._registry.tenants[namespace.tenant])
        return len(known)

    async def flush(
        self, namespace: Namespace, keys: Sequence[EngineKey] | None, salt: bytes, deadline: float
    ) -> list[BlockResult]:
        """Return once blocks are durable on disk; `keys` None: all of the namespace that have host bytes."""
        if keys is None:
            return await self._settle_all(namespace, deadline)
        return await self._settle(namespace, keys, salt, deadline, evict=False)

    async def demote(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float
    ) -> list[BlockResult]:
        """Return once blocks are durable on disk and gone from the host."""
        return await self._settle(namespace, keys, salt, deadline, evict=True)

    async def _settle(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float, *, evict: bool
    ) -> list[BlockResult]:
        pairs = [(key, self._record_key(namespace, salt, key)) for key in dict.fromkeys(keys)]
        tenant = self._registry.tenants[namespace.tenant]
        return await settle(self._driver, tenant, pairs, deadline, evict=evict)

    async def _settle_all(self, namespace: Namespace, deadline: float) -> list[BlockResult]:
        pairs = [(o.engine_key, key) for key, o in self._driver.origins.items() if o.namespace is namespace]
        return await settle(self._driver, self._registry.tenants[namespace.tenant], pairs, deadline)

    def stats(self) -> Stats:
        """Return the daemon at this moment."""
        catalog = self._driver.catalog
        shelves = catalog.residents.shelves
        entries = catalog.residents.entries
        return Stats(
            boot_id=self.boot_id,
            uptime_s=round(time.monotonic() - self._started, 3),
            blocks=len(entries),
            waiting=self._driver.waiting,
            demoting=catalog.room.demoting,
            tiers={t: TierStats(shelf.capacity, shelf.used, shelf.blocks) for t, shelf in shelves.items()},
            namespaces=len(self._registry.all()),
        )

    def metrics_text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        stats = self.stats()
        for tier, sums in stats.tiers.items():
            self.metrics.used.labels(tier).set(sums.used)
            self.metrics.capacity.labels(tier).set(sums.capacity)
        self.metrics.blocks.set(stats.blocks)
        self.metrics.waiting.set(stats.waiting)
        for lane in self._lanes:
            self.metrics.queue.labels(lane.name).set(lane.pending)
        return self.metrics.text()

    def _record_key(self, namespace: Namespace, salt: bytes, key: EngineKey) -> RecordKey:
        return self._registry.tenants[namespace.tenant].keys.record_key(namespace.digest, salt, key)
