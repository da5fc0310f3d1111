"""What is done with the blocks of a namespace: stored, read, moved, deleted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import islice

from kvtcd.core import events as ev
from kvtcd.core.errors import Busy, DeadlineExceeded, KvtcdError, NotFound, Stopping
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.messages import BlockResult
from kvtcd.core.place import Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.engine.destination import Destination
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.errands import Errands
from kvtcd.engine.metrics import NOWHERE, Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Memory
from kvtcd.engine.readers import Readers
from kvtcd.engine.recorder import Line, Recorder
from kvtcd.engine.remote.tier import RemoteTier
from kvtcd.engine.sessions import Batch, Lease, settle
from kvtcd.engine.sharing import Sharing
from kvtcd.engine.straight import Straight
from kvtcd.engine.tally import Tally
from kvtcd.engine.tenancy import Tenancy

READ_AHEAD = 4
"""Blocks of one request that are fetched before their turn."""
LATE = "deadline-exceeded"


class Blocks:
    """The blocks of all namespaces. All methods belong to the loop; `deadline` is a time of the loop's clock.

    Args:
        driver: owns the catalog.
        memory: the host tier.
        tenancy: tenants and namespaces.
        metrics: told what was found.
        tally: told the same.
        errands: ends what outlasts its caller.
        recorder: told what was asked for, if there is one.
        remote: the remote tier, if there is one.

    Attributes:
        draining: no blocks are taken any more.
        sharing: what concerns the remote tier.
    """

    def __init__(
        self, *, driver: Driver, memory: Memory, tenancy: Tenancy, metrics: Metrics, tally: Tally,
        errands: Errands, recorder: Recorder | None, remote: RemoteTier | None = None,
    ) -> None:  # fmt: skip
        self.draining = False
        self._driver, self._memory, self._tenancy = driver, memory, tenancy
        self._metrics, self._tally, self._recorder = metrics, tally, recorder
        self._errands, self._remote = errands, remote
        self.sharing = Sharing(driver.catalog, remote)
        self._registry = tenancy.registry
        self._readers = Readers()
        self._straight = Straight(driver, self._readers)
        metrics.oldest_reader.set_function(self._readers.oldest_s)

    @asynccontextmanager
    async def batch(
        self, namespace: Namespace, salt: bytes, deadline: float, *, durable: bool = False
    ) -> AsyncIterator[Batch]:
        """Store blocks of one request; what is not committed when the context ends is given back.

        With `durable` the commit waits until they are on disk.

        Raises:
            Stopping: no blocks are taken any more.
        """
        if self.draining:
            raise Stopping
        batch = Batch(
            self._driver, self._memory, self._registry, namespace=namespace, salt=salt, deadline=deadline,
            metrics=self._metrics, durable=durable, recorder=self._recorder,
        )  # fmt: skip
        try:
            yield batch
        finally:
            batch.abandon()
            for record_key in batch.known:
                self.sharing.needed(namespace, record_key)

    @asynccontextmanager
    async def read(
        self, namespace: Namespace, key: EngineKey, salt: bytes, deadline: float,
        into: Destination | None = None,
    ) -> AsyncIterator[Lease]:  # fmt: skip
        """Hold one block in host memory while it is read, bringing it up if need be.

        A block that can go straight to the destination (`engine.straight`) has landed then. Of one that could
        not, what is there is undefined, and it goes over the host.

        Raises:
            BadRequest: the destination is too small.
            NotFound: it is not here, or proved to be damaged.
            Busy: it is here, but could not be brought up now.
            DeadlineExceeded: not within the caller's time.
        """
        record_key = self._registry.record_keys(namespace, salt)(key)
        self._note(namespace, [record_key])
        async with self._read(namespace, key, record_key, deadline, into) as lease:
            yield lease

    @asynccontextmanager
    async def _read(
        self, namespace: Namespace, key: EngineKey, record_key: RecordKey, deadline: float,
        into: Destination | None,
    ) -> AsyncIterator[Lease]:  # fmt: skip
        fetched = await self.sharing.fetched(namespace, record_key, deadline)
        found = self._driver.catalog.places(record_key)[:1]
        place = await self._pinned(namespace, record_key, deadline, self._straight.places(namespace, into))
        entry = self._driver.catalog.residents.entries[record_key]
        nbytes, tokens, pieces = entry.raw_bytes, entry.tokens, None
        landed = into is not None and await self._straight.landed(record_key, nbytes, place, into)
        if not landed:
            if place is not Place.HOST:
                await self._pinned(namespace, record_key, deadline)
            pieces = list(self._memory.pieces(record_key))
        try:
            self._count(namespace, Tier.REMOTE if fetched else found[0])
            self._tally.found(namespace.number, Tier.REMOTE if fetched else found[0])
            if found[0] is not Place.DISK:  # else it was read for this
                self.sharing.needed(namespace, record_key)
            with self._readers.reading():
                yield Lease(key, nbytes, tokens, Tier.REMOTE if fetched else found[0].tier, pieces)
        finally:
            if pieces is not None:
                self._driver.tell(ev.Release(record_key))

    async def _pinned(
        self, namespace: Namespace, record_key: RecordKey, deadline: float,
        straight: frozenset[Place] = frozenset(),
    ) -> Place:  # fmt: skip
        """Return where a copy of a block is pinned from now on: on the host, or whence it goes `straight`."""
        granted: list[ev.Grant] = []
        request = Request(
            lambda ticket: ev.Get(ticket, record_key, straight),
            granted.append,
            lambda grant: ev.Release(record_key, _pinned_at(grant)),
        )
        reason = await self._driver.ask(request, deadline)
        if reason in (Reason.FAILED, Reason.TOO_LARGE):
            self._count(namespace, reason)
            failed = "failed, the daemon's log says why" if reason is Reason.FAILED else "is at its bound"
            raise Busy("the way up from disk", why=failed)
        if reason is not None:
            self._count(namespace, NOWHERE)
            self._tally.found(namespace.number, None)
            raise NotFound
        return _pinned_at(granted[0])

    def _count(self, namespace: Namespace, found: object) -> None:
        if not namespace.trial:
            self._metrics.gets.labels(found).inc()

    async def read_many(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float,
        into: Sequence[Destination | None] | None = None,
    ) -> AsyncGenerator[tuple[EngineKey, Lease | None], None]:  # fmt: skip
        """Yield each key with its lease, or None for a miss; a lease ends when the next one is asked for.

        A few blocks are brought up ahead of their turn, so that reading and unpacking overlap. `into`: as of
        `read`, for each key.
        """

        async def enter(
            stack: AsyncExitStack, key: EngineKey, record_key: RecordKey, destination: Destination | None
        ) -> Lease | None:
            read = self._read(namespace, key, record_key, deadline, destination)
            try:
                return await stack.enter_async_context(read)
            except NotFound as error:
                if error.what != NotFound().what:
                    raise  # the destination is no more
            except Busy:
                pass
            return None

        ahead: deque[tuple[EngineKey, AsyncExitStack, asyncio.Task[Lease | None]]] = deque()
        record_keys = [*map(self._registry.record_keys(namespace, salt), keys)]
        waiting = zip(keys, record_keys, into or [None] * len(keys), strict=True)
        self._note(namespace, record_keys)
        try:
            while True:
                for key, record_key, destination in islice(waiting, READ_AHEAD - len(ahead)):
                    stack = AsyncExitStack()
                    entering = enter(stack, key, record_key, destination)
                    ahead.append((key, stack, asyncio.create_task(entering)))
                if not ahead:
                    break
                key, stack, task = ahead[0]
                yield key, await task
                ahead.popleft()
                await stack.aclose()
            self._driver.tell(ev.Touch(tuple(record_keys)))
        finally:
            for _, stack, task in ahead:
                task.cancel()
                with suppress(asyncio.CancelledError, KvtcdError):
                    await task
                await stack.aclose()

    async def delete(self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes) -> int:
        """Remove blocks, durably; return how many there were, those included that are just going.

        They are served no more from now on. Their bytes go when readers and leases have ended, also when
        whoever asked for it does not wait so long.

        Raises:
            StoreFailed: a record could not be removed from disk.
        """
        catalog = self._driver.catalog
        record_keys = [*map(self._registry.record_keys(namespace, salt), keys)]
        known = [key for key in record_keys if catalog.places(key) or key in catalog.residents.doomed]
        owner, remote = self._registry.tenants[namespace.tenant], self._remote
        if remote is None or namespace.trial:  # nothing of a trial is ever there
            await self._errands.finish("delete", self._tenancy.delete(known, owner))
            return len(known)
        there = self.sharing.there(namespace, keys, record_keys)

        async def everywhere() -> None:
            # Served no more from now on; and once more, when no move is under way that could offer one.
            await asyncio.gather(remote.forget(namespace, record_keys), self._tenancy.delete(known, owner))
            await remote.forget(namespace, known)

        await self._errands.finish("delete", everywhere())
        self.sharing.unshared(namespace, [*there], salt)
        return len({*known, *there.values()})

    async def flush(
        self, namespace: Namespace, keys: Sequence[EngineKey] | None, salt: bytes, deadline: float
    ) -> list[BlockResult]:
        """Return once blocks are durable on disk; `keys` None: all of the namespace that have host bytes."""
        if keys is None:
            return await self.flush_all(namespace, deadline)
        return await self._settle(namespace, keys, salt, deadline, evict=False)

    async def demote(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float,
        progress: Callable[[], None] = lambda: None,
    ) -> list[BlockResult]:  # fmt: skip
        """Return once blocks are durable on disk and gone from the host; `progress` is told of each."""
        return await self._settle(namespace, keys, salt, deadline, evict=True, progress=progress)

    async def prefetch(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float,
        progress: Callable[[], None] = lambda: None, *, tier: Tier = Tier.HOST,
    ) -> list[BlockResult]:  # fmt: skip
        """Bring blocks up to a tier of memory, a few at a time; `progress` is told of each."""
        gate, names = asyncio.Semaphore(READ_AHEAD), self._registry.record_keys(namespace, salt)

        async def one(key: EngineKey) -> BlockResult:
            record_key = names(key)
            request = Request(lambda ticket: ev.Prefetch(ticket, record_key, tier))
            try:
                async with gate:
                    await self.sharing.fetched(namespace, record_key, deadline)
                    reason: str | None = await self._driver.ask(request, deadline)
            except DeadlineExceeded:
                reason = LATE
            progress()
            return BlockResult(key, "stored" if reason is None else "dropped", reason)

        return await asyncio.gather(*(one(key) for key in dict.fromkeys(keys)))

    async def _settle(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, deadline: float, *, evict: bool,
        progress: Callable[[], None] = lambda: None,
    ) -> list[BlockResult]:  # fmt: skip
        names = self._registry.record_keys(namespace, salt)
        pairs = [(key, names(key)) for key in dict.fromkeys(keys)]
        tenant = self._registry.tenants[namespace.tenant]
        return await settle(self._driver, tenant, pairs, deadline, evict=evict, progress=progress)

    async def flush_all(self, namespace: Namespace, deadline: float) -> list[BlockResult]:
        """Return once all blocks of a namespace that have host bytes are durable on disk."""
        pairs = [(o.engine_key, key) for key, o in self._driver.origins.items() if o.namespace is namespace]
        return await settle(self._driver, self._registry.tenants[namespace.tenant], pairs, deadline)

    def _note(self, namespace: Namespace, record_keys: Sequence[RecordKey]) -> None:
        if self._recorder:
            self._recorder.note(Line("get", namespace, record_keys))


def _pinned_at(grant: ev.Grant) -> Place:
    assert grant.place is not None, "who may read is told where"
    return grant.place
