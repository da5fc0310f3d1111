"""What the store has to forget: told until it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvtcd.core.errors import KvtcdError, RemoteFailed
from kvtcd.core.keys import TenantKeys
from kvtcd.core.remote.breaker import pause
from kvtcd.core.remote.ledger import Known, Purge
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.generations import FRESH_S, Generations

_FIRST_S, _LONGEST_S = 0.5, 60.0
_AT_ONCE = 1000
"""Names of one call."""
_log = logging.getLogger(__name__)


class Purges:
    """Purges namespaces and deletes records in a store. All methods belong to the loop.

    A daemon that has not read the new generation yet may still write under the old one: nobody will look
    there, and when that time is over the store is swept once more.

    Args:
        caller: of the store.
        generations: whose ledger has what is to be done.
        derive: returns a tenant's keys.
        luck: see `pause`.
    """

    def __init__(
        self, caller: Caller, generations: Generations, derive: Callable[[str], TenantKeys],
        luck: Callable[[], float],
    ) -> None:  # fmt: skip
        self._caller, self._generations, self._derive, self._luck = caller, generations, derive, luck
        self._woken = asyncio.Event()
        self._again: dict[tuple[str, bytes], float] = {}
        """When the store is swept for the last time, after a sweep that removed what was there then.

        By tenant and namespace, or by the names of a master key that holds no more.
        """
        self._told = asyncio.Condition()

    def wake(self) -> None:
        """Do at once what the ledger has been told."""
        self._woken.set()

    def doomed(self, name: str) -> bool:
        """Tell whether a record is still to go."""
        return name in self._generations.ledger.deletes

    async def told(self, tenant: str, namespace: bytes, seconds: float) -> bool:
        """Wait until the store holds nothing of what was purged; False: not within so many seconds."""
        known = self._generations.ledger.of(tenant, namespace)
        self._again.pop((tenant, namespace), None)
        self._woken.set()
        try:
            async with asyncio.timeout(seconds), self._told:
                await self._told.wait_for(lambda: known.heard)
        except TimeoutError:
            return False
        return True

    async def delete(self, doomed: Sequence[str]) -> None:
        """Remove records: at once if the store can be asked, else as soon as it can, durably.

        Raises:
            StoreFailed: that is not sure.
        """
        try:
            await self._deleted(doomed)
        except RemoteFailed as error:
            _log.warning(
                "%d deleted blocks are still in the remote store, which is told again: %s", len(doomed), error
            )
            self._generations.ledger.deletes.update(doomed)
            await self._generations.saved()
            self._woken.set()

    async def run(self) -> None:
        """Do what is to be done, without end."""
        attempt = 0
        while True:
            failed = await self._round()
            attempt = attempt + 1 if failed else 0
            wait = pause(attempt, _FIRST_S, _LONGEST_S, self._luck) if failed else self._until_swept()
            try:
                async with asyncio.timeout(wait):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            if failed:  # new work is no reason to ask sooner
                await asyncio.sleep(min(_FIRST_S, wait or 0.0))

    async def _round(self) -> bool:
        """Try all of it once; tell whether something failed."""
        failed, ledger = False, self._generations.ledger
        sweeps = [(f"tenant {known.tenant}", self._sweep(known)) for known in ledger.purges()]
        sweeps += [(f"names {one.prefix}…", self._sweep_former(one)) for one in [*ledger.former]]
        for whose, sweep in sweeps:
            try:
                await sweep
            except KvtcdError as error:
                failed = True
                _log.warning("a purge of %s is not through in the remote store: %s", whose, error)
        if doomed := list(ledger.deletes):
            try:
                await self._deleted(doomed)
                ledger.deletes.difference_update(doomed)
                await self._generations.saved()
            except KvtcdError:
                failed = True
        return failed

    async def _sweep(self, known: Known) -> None:
        this, generation = (known.tenant, known.namespace), known.generation
        now = asyncio.get_running_loop().time()
        if known.heard and now < self._again.get(this, 0.0):
            return
        await self._emptied(Purge.of(self._derive(known.tenant), known.namespace, generation))
        if known.generation != generation:
            return  # purged once more meanwhile
        if known.heard:
            self._again.pop(this, None)
            known.purging = False
            await self._generations.saved()
            return
        self._again[this] = now + 2 * FRESH_S
        known.heard = True
        async with self._told:
            self._told.notify_all()

    async def _sweep_former(self, purge: Purge) -> None:
        """Sweep what lies under the names of a master key that holds no more: now, and once more later."""
        this, now = (purge.prefix, b""), asyncio.get_running_loop().time()
        if now < self._again.get(this, 0.0):
            return
        await self._emptied(purge)
        if this not in self._again:
            self._again[this] = now + 2 * FRESH_S
            return
        del self._again[this]
        self._generations.ledger.former.remove(purge)
        await self._generations.saved()

    async def _emptied(self, purge: Purge) -> None:
        """Have the store say which generation is valid, and hold nothing of others."""
        try:
            await self._caller.put_one(purge.name, purge.stated, urgent=True)
        except RemoteFailed as error:
            # A store that is full takes no number before something has gone. That was to go anyway; what
            # others put under the old number until the new one is there goes with the sweep behind it.
            _log.debug("a purge removes records before the number can be raised: %s", error)
            await self._swept(purge)
            await self._caller.put_one(purge.name, purge.stated, urgent=True)
        await self._swept(purge)

    async def _swept(self, purge: Purge) -> None:
        found = await self._caller.names(purge.prefix)
        await self._deleted([name for name in found if purge.dooms(name)])

    async def _deleted(self, doomed: Sequence[str]) -> None:
        for start in range(0, len(doomed), _AT_ONCE):
            await self._caller.delete(doomed[start : start + _AT_ONCE])

    def _until_swept(self) -> float | None:
        """Return the seconds until the next sweep, None if none is to come."""
        if not self._again:
            return None
        return max(0.0, min(self._again.values()) - asyncio.get_running_loop().time())
