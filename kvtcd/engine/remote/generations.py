"""Which generation of a namespace is valid: read from the store before any of it is served, and often.

A purge raises the number, so whatever any daemon put under an older one is never looked at again, and every
daemon drops its own blocks of that namespace when it reads the new one, at the latest after `FRESH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kvtcd.core.errors import Corrupt, RemoteFailed, StoreFailed
from kvtcd.core.keys import TenantKeys
from kvtcd.core.remote import names
from kvtcd.core.remote.ledger import Ledger, Save
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace, Registry
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures

FRESH_S = 30.0
"""How long a generation that was read is believed: the longest that a purge elsewhere goes unnoticed."""
_LOOK_S = FRESH_S / 3
_MOST_BYTES = 256
_log = logging.getLogger(__name__)


class Generations:
    """Reads and raises the numbers. All methods belong to the loop.

    Args:
        caller: of the store.
        registry: of namespaces.
        ledger: what was known before.
        save: makes it durable.
        lane: on which that happens.
        figures: told of what is refused.
        clock: seconds.

    Attributes:
        ledger: as it is now.
        cleared: empties a namespace here, whose blocks were purged elsewhere.
    """

    def __init__(
        self, caller: Caller, registry: Registry, ledger: Ledger, save: Save, lane: Lane, *,
        figures: Figures, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._caller, self._registry, self._figures, self._clock = caller, registry, figures, clock
        self._save, self._lane = save, lane
        self.ledger = ledger
        self.cleared: Callable[[Namespace], Awaitable[None]] = _stays
        self._read: dict[int, float] = {}
        """When the generation of each namespace, by its number, was read last."""
        self._reading: dict[int, asyncio.Task[None]] = {}
        figures.purges.set(ledger.pending)

    def keys(self, namespace: Namespace) -> TenantKeys:
        """Return the keys of a namespace's tenant."""
        return self._registry.tenants[namespace.tenant].keys

    def current(self, namespace: Namespace) -> int | None:
        """Return the generation that is valid; None while that is not known, and nothing may be served."""
        known = self.ledger.of(namespace.tenant, namespace.digest)
        fresh = self._clock() - self._read.get(namespace.number, -FRESH_S) < FRESH_S
        return known.generation if fresh and (known.heard or not known.purging) else None

    async def ensure(self, namespace: Namespace) -> int:
        """Return the generation that is valid, read from the store if that was too long ago.

        Raises:
            RemoteFailed: it cannot be had now.
        """
        if (found := self.current(namespace)) is not None:
            return found
        if namespace.number not in self._reading:
            task = asyncio.create_task(self._refresh(namespace), name="kvtcd-generation")
            self._reading[namespace.number] = task
            task.add_done_callback(lambda _: self._reading.pop(namespace.number))
        await asyncio.shield(self._reading[namespace.number])
        if (found := self.current(namespace)) is None:
            raise RemoteFailed("generation", "a purge of this namespace is not through yet")
        return found

    async def watch(self) -> None:
        """Read the numbers of all namespaces again and again, without end."""
        while True:
            for namespace in self._registry.all():
                if self._clock() - self._read.get(namespace.number, -FRESH_S) < _LOOK_S:
                    continue
                try:
                    await self._refresh(namespace)
                except RemoteFailed as error:
                    _log.debug("generation of namespace %s: %s", namespace.name, error)
            await asyncio.sleep(_LOOK_S / 2)

    async def raised(self, namespace: Namespace) -> None:
        """Have a namespace purged in the store, whatever happens from now on: the number is raised, durably.

        Raises:
            StoreFailed: that is not sure.
        """
        known = self.ledger.of(namespace.tenant, namespace.digest)
        known.generation = max(known.generation + 1, time.time_ns() // 1_000_000)
        known.purging, known.heard = True, False
        self._read.pop(namespace.number, None)
        await self.saved()

    async def saved(self) -> None:
        """Make the ledger durable.

        Raises:
            StoreFailed: it is not.
        """
        self._figures.purges.set(self.ledger.pending)
        try:
            await self._lane.run(self._save, self.ledger.to_bytes())
        except OSError as error:
            raise StoreFailed("remote ledger", error.strerror or str(error)) from None

    async def _refresh(self, namespace: Namespace) -> None:
        known, keys = self.ledger.of(namespace.tenant, namespace.digest), self.keys(namespace)
        begun = self._clock()
        answer = await self._caller.value(names.generation_name(keys, namespace.digest), _MOST_BYTES)
        if (known.purging and not known.heard) or not self._registry.admits(namespace):
            return
        try:
            said = names.FIRST if answer is None else names.stated_generation(keys, namespace.digest, answer)
        except Corrupt as error:
            self._figures.refused.labels(type(error).__name__).inc()
            _log.error(
                "the generation of namespace %s, tenant %s, in the remote store is refused, and replaced by "
                "the one that is known here: %s (who else writes to it?)",
                namespace.name, namespace.tenant, error,
            )  # fmt: skip
            await self._state(namespace, known.generation)  # as good as lost
            said = known.generation
        if said < known.generation:
            await self._state(namespace, known.generation)  # the store has lost it
        elif said > known.generation:
            _log.info("namespace %s of tenant %s was purged elsewhere", namespace.name, namespace.tenant)
            try:
                await self.cleared(namespace)
                known.generation = said
                await self.saved()
            except StoreFailed as error:
                raise RemoteFailed("generation", f"of namespace {namespace.name}: {error}") from None
        self._read[namespace.number] = begun

    async def _state(self, namespace: Namespace, generation: int) -> None:
        keys = self.keys(namespace)
        value = names.state_generation(keys, namespace.digest, generation)
        await self._caller.put_one(names.generation_name(keys, namespace.digest), value, urgent=True)


async def _stays(_: Namespace) -> None:
    """Know of nothing here that would have to go."""
