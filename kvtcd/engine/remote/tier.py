"""The remote tier as the engine sees it: offered to, asked, and never waited for by a put."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from kvtcd.core.errors import RemoteFailed
from kvtcd.core.keys import RecordKey
from kvtcd.core.remote import names
from kvtcd.core.remote.breaker import BreakerState
from kvtcd.core.remote.presence import Presence
from kvtcd.engine.errands import Errands
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.remote.arrivals import Arrivals
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures
from kvtcd.engine.remote.generations import Generations
from kvtcd.engine.remote.profiles import Profiles
from kvtcd.engine.remote.purges import Purges
from kvtcd.engine.remote.reminders import Reminders
from kvtcd.engine.remote.stats import RemoteStats
from kvtcd.engine.remote.upkeep import Upkeep
from kvtcd.engine.remote.writing import WRITERS, Parcel, Writing
from kvtcd.engine.steps import Origin, Record

FIRST_LOOK, LONGEST_LOOK = 16, 512
"""Names of the first call of a match, and of its later ones at most: most misses show at once."""
PURGE_S = 5.0
"""Seconds that a purge waits for the store before it is answered that it goes on."""
_GLANCE_S = 0.1
"""Time between two looks, at the end, at whether the store still answers."""
_AGAIN_S, _END_S = 0.5, 10.0
"""In the end: time after which what still runs is cancelled again, and after which it is left behind."""
_log = logging.getLogger(__name__)


class RemoteTier:
    """What the engine needs of a shared store. All methods belong to the loop; none fails because of it.

    Only full blocks travel: a partial one ends a sequence of this host, and its successor replaces it.

    Args:
        caller, generations, presence, writing, arrivals, profiles, upkeep, purges: its parts.
        registry: of namespaces.
        lane: of theirs, closed in the end.
        figures: what they count.
        errands: what runs without a caller.
        look_s: seconds that a match waits for the store.
    """

    def __init__(
        self, *, caller: Caller, generations: Generations, presence: Presence, writing: Writing,
        arrivals: Arrivals, profiles: Profiles, upkeep: Upkeep, purges: Purges, registry: Registry,
        lane: Lane, figures: Figures, errands: Errands, look_s: float,
    ) -> None:  # fmt: skip
        self._caller, self._generations, self._presence = caller, generations, presence
        self._writing, self._arrivals, self._purges = writing, arrivals, purges
        self.profiles, self._upkeep, self.lane = profiles, upkeep, lane
        self._registry, self._figures, self._errands, self._look_s = registry, figures, errands, look_s
        self._reminders = Reminders(registry, lane, self._absent, self.packed)
        self._looking: set[asyncio.Task[None]] = set()
        self._running: list[asyncio.Task[None]] = []

    # Life -----------------------------------------------------------------------------------------------

    def start(
        self,
        cleared: Callable[[Namespace], Awaitable[None]],
        written: Callable[[Parcel], None],
        profiled: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Begin to write what is offered, to watch the generations, and to go on with purges.

        Args:
            cleared: empties a namespace here, whose blocks were purged elsewhere.
            written: told of each block that the store has from now on.
            profiled: packs anew what went without a profile, when one came from the store.
        """
        self._writing.written = written
        self.profiles.arrived = lambda: self._errands.start("profile", profiled())
        self._generations.cleared = cleared
        works = [
            self._generations.watch(),
            self._purges.run(),
            self._reminders.run(),
            self._upkeep.run(),
            *(self._writing.run() for _ in range(WRITERS)),
        ]
        self._running = [self._errands.start("remote", work) for work in works]

    async def close(self, deadline: float) -> None:
        """Write what waits, if that can be done in time, and end.

        Args:
            deadline: loop time; what is not written by then is not written.
        """
        loop = asyncio.get_running_loop()
        while (
            not (self.away or self.refusing or self._writing.stuck) and (left := deadline - loop.time()) > 0
        ):
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _GLANCE_S)):
                    await self._writing.drained()
                    await self._upkeep.settled()  # of no use is what cannot be unpacked elsewhere
                    break
        if unwritten := self._writing.waiting[0]:
            _log.warning("%d blocks were not written to the remote store", unwritten)
        self._caller.end()
        await _ended({*self._running, *self._looking, *self.profiles.running})
        await self.profiles.close()
        await self._errands.ended()
        await self._caller.close()
        await self.lane.close()

    # Blocks ---------------------------------------------------------------------------------------------

    def packed(self, key: RecordKey, record: Record, origin: Origin, tenant: Tenant) -> None:
        """Have the record of a block that was just packed written in its turn, if its policy says so."""
        namespace = origin.namespace
        full = origin.tokens == namespace.identity.block_tokens
        if full and self._writes(namespace) and self._registry.admits(namespace):
            self._writing.offer(Parcel(key, origin.parent, record, namespace, tenant))

    def passed(self, key: RecordKey, record: Record, origin: Origin, tenant: Tenant) -> None:
        """Have a record that was read written, too, unless the store is known to have it."""
        name = self._name(origin.namespace, key)
        if self._writes(origin.namespace) and not (name and self._presence.ask(name)):
            self.packed(key, Record(record.envelope, bytearray(record.bytes)), origin, tenant)

    def needed(self, namespace: Namespace, key: RecordKey) -> None:
        """Have a block written that is used here and lies on disk, if the store proves not to have it."""
        name = self._name(namespace, key)
        if self._writes(namespace) and name and not self._presence.ask(name):
            self._reminders.remind(namespace, key)

    @property
    def away(self) -> bool:
        """Whether the store is left alone, since it does not answer."""
        return self._caller.state is not BreakerState.CLOSED

    @property
    def refusing(self) -> bool:
        """Whether blocks wait that the store, though it answers, does not take."""
        return self._caller.writes.state is not BreakerState.CLOSED and bool(self._writing.waiting[0])

    async def drained(self) -> None:
        """Return when nothing waits to be written."""
        await self._writing.drained()

    def has(self, namespace: Namespace, key: RecordKey) -> bool:
        """Tell whether a block is known to be there, without asking."""
        name = self._name(namespace, key)
        return name is not None and self._presence.ask(name) is True and not self._purges.doomed(name)

    async def look(self, namespace: Namespace, keys: Sequence[RecordKey]) -> None:
        """Find out which of some blocks are there, up to the first that is not; `has` tells.

        What the store has not answered in time is a miss now, and known next time.
        """
        if not self._reads(namespace) or not keys:
            return
        task = asyncio.create_task(self._look(namespace, keys), name="kvtcd-look")
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)
        await asyncio.wait([task], timeout=self._look_s)

    async def bring(self, namespace: Namespace, key: RecordKey, deadline: float) -> bool:
        """Bring a block here, packed as it is; tell whether it is here now.

        Raises:
            DeadlineExceeded: not within the caller's time; it comes all the same.
        """
        if not self._reads(namespace):
            return False
        name = self._name(namespace, key)
        if name is not None and (self._presence.ask(name) is False or self._purges.doomed(name)):
            return False
        if self._caller.breaker.wait:
            return False
        return await self._arrivals.bring(namespace, key, deadline)

    async def forget(self, namespace: Namespace, keys: Sequence[RecordKey]) -> None:
        """Remove blocks: now if the store can be asked, else as soon as it can."""
        self._writing.forget(namespace, keys)
        generation = self._generations.ledger.of(namespace.tenant, namespace.digest).generation
        tag = self._registry.tenants[namespace.tenant].keys
        doomed = [names.record_name(tag, namespace.digest, generation, key) for key in keys]
        for name in doomed:
            self._presence.note(name, there=False)
        await self._purges.delete(doomed)

    # Namespaces -----------------------------------------------------------------------------------------

    async def purge(self, namespace: Namespace) -> None:
        """Have the store forget a namespace, whatever happens from now on."""
        await self._generations.raised(namespace)
        self.emptied(namespace)

    async def purged(self, namespace: Namespace) -> bool:
        """Wait a little for the store to have forgotten it; False: that goes on."""
        return await self._purges.told(namespace.tenant, namespace.digest, PURGE_S)

    def emptied(self, namespace: Namespace) -> None:
        """Forget what is known and waits of a namespace."""
        self._writing.forget(namespace)
        self._presence.forget(names.prefix(self._registry.tenants[namespace.tenant].keys, namespace.digest))

    # Numbers --------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Have the gauges tell how it is now."""
        self._figures.breaker(self._caller.state)

    def stats(self) -> RemoteStats:
        """Return how it is."""
        caller, pending = self._caller, self._generations.ledger.pending
        parts = self._upkeep.left, self.profiles.left
        return RemoteStats.of(
            self._figures, caller.breaker, caller.writes, self._writing.waiting, pending, parts=parts
        )

    def _writes(self, namespace: Namespace) -> bool:
        return namespace.policy.remote.write == "behind" and not namespace.trial

    def _reads(self, namespace: Namespace) -> bool:
        return namespace.policy.remote.read

    def _name(self, namespace: Namespace, key: RecordKey) -> str | None:
        generation = self._generations.current(namespace)
        if generation is None:
            return None
        keys = self._registry.tenants[namespace.tenant].keys
        return names.record_name(keys, namespace.digest, generation, key)

    async def _look(self, namespace: Namespace, keys: Sequence[RecordKey]) -> None:
        try:
            generation = await self._generations.ensure(namespace)
            tenant = self._registry.tenants[namespace.tenant].keys
            start, size = 0, FIRST_LOOK
            while start < len(keys):
                part = keys[start : start + size]
                start, size = start + size, min(2 * size, LONGEST_LOOK)
                asked = [names.record_name(tenant, namespace.digest, generation, key) for key in part]
                if not await self._all_there(asked):
                    return
        except RemoteFailed as error:
            _log.debug("the remote store was not looked at: %s", error)

    async def _all_there(self, asked: Sequence[str]) -> bool:
        there = await self._find_out(asked)
        return all(there.get(name) for name in asked)

    async def _absent(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[RecordKey]:
        if self._writing.crowded:
            return []
        generation = await self._generations.ensure(namespace)
        tenant = self._registry.tenants[namespace.tenant].keys
        named = {names.record_name(tenant, namespace.digest, generation, key): key for key in keys}
        there = await self._find_out(list(named))
        return [key for name, key in named.items() if there.get(name) is False]

    async def _find_out(self, asked: Sequence[str]) -> dict[str, bool]:
        """Return which names are there, as far as that is known; what is not is asked for."""
        known = {name: there for name in asked if (there := self._presence.ask(name)) is not None}
        unknown = [name for name in asked if name not in known]
        if unknown:
            for name, answer in zip(unknown, await self._caller.exists(unknown), strict=True):
                if isinstance(answer, bool):
                    self._presence.note(name, there=answer)
                    known[name] = answer
        return known


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    Once is not enough: what ends at that moment is taken for the answer by `asyncio.wait_for` of Python
    3.11, by which libraries wait, and the cancellation is lost.
    """
    until = asyncio.get_running_loop().time() + _END_S
    while tasks and asyncio.get_running_loop().time() < until:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_AGAIN_S)
    for task in tasks:
        _log.error("%s of the remote store does not end, and is left behind", task.get_name())
