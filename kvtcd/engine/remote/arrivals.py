"""Read-through: a block that another daemon has stored comes here, and is one of ours from then on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvtcd.core import events as ev
from kvtcd.core.arrival import Arrival
from kvtcd.core.errors import Corrupt, DeadlineExceeded, RemoteFailed
from kvtcd.core.keys import RecordKey, log_name
from kvtcd.core.place import Form, Place
from kvtcd.core.reason import Reason
from kvtcd.core.record import MAX_ENVELOPE_BYTES, Envelope
from kvtcd.core.remote import names
from kvtcd.core.remote.presence import Presence
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.errands import Errands
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace, Registry
from kvtcd.engine.ports import Memory, Value
from kvtcd.engine.remote import figures as fig
from kvtcd.engine.remote import parcels
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures
from kvtcd.engine.remote.generations import Generations
from kvtcd.engine.remote.turns import Turns
from kvtcd.engine.steps import Origin, Record

TOGETHER, CALLS = 4, 3
"""Blocks of one call, and calls under way."""
AT_ONCE = CALLS + 1
"""Batches on their way here: as many are checked, or wait, as are fetched."""
ROOM_S = 10.0
"""Seconds that a block which has arrived waits for room in host memory."""
AT_HAND = 1 << 20
"""Bytes of a blob that is checked and copied on the loop, in .2 ms: a change of threads takes longer."""
_SLACK = 1 << 20
"""Bytes that a blob may have beyond those of its block."""
_log = logging.getLogger(__name__)


class Arrivals:
    """Fetches blocks from a store into packed host memory. All methods belong to the loop.

    Args:
        caller: of the store.
        generations: under which records are looked for.
        presence: told of what is not there.
        driver: owns the catalog.
        memory: the host tier.
        registry: of namespaces.
        lane: on which records are checked and laid down.
        figures: told what was found.
        errands: by which a block arrives also when whoever asked for it has gone.
    """

    def __init__(
        self, caller: Caller, generations: Generations, presence: Presence, *, driver: Driver,
        memory: Memory, registry: Registry, lane: Lane, figures: Figures, errands: Errands,
    ) -> None:  # fmt: skip
        self._caller, self._generations, self._presence = caller, generations, presence
        self._driver, self._memory, self._registry = driver, memory, registry
        self._lane, self._figures, self._errands = lane, figures, errands
        self._fetching = asyncio.Semaphore(CALLS)
        self._arriving = Turns("arrival", self._arrive, errands, most=TOGETHER, at_once=AT_ONCE)

    async def bring(self, namespace: Namespace, key: RecordKey, deadline: float) -> bool:
        """Bring a block into host memory, packed as it is; tell whether it is here now.

        Raises:
            DeadlineExceeded: not within the caller's time; it comes all the same.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._arriving.ask(namespace, key)
        except TimeoutError:
            raise DeadlineExceeded("the remote store", round(loop.time() - begun, 3)) from None

    async def _arrive(self, namespace: Namespace, keys: Sequence[RecordKey]) -> list[bool]:
        outcomes = dict.fromkeys(keys, fig.FAILED)
        try:
            generation = await self._generations.ensure(namespace)
            await self._fetch(namespace, generation, outcomes)
        except RemoteFailed as error:
            _log.debug("%d records were not fetched: %s", len(keys), error)
        for outcome in outcomes.values():
            self._figures.gets.labels(outcome).inc()
        return [outcome == fig.HIT for outcome in outcomes.values()]

    async def _fetch(self, namespace: Namespace, generation: int, outcomes: dict[RecordKey, str]) -> None:
        """Have blocks come, and note what became of each; one is checked while the next is under way."""
        tenant, identity = self._registry.tenants[namespace.tenant], namespace.identity
        asked = {names.record_name(tenant.keys, namespace.digest, generation, key): key for key in outcomes}
        most = 2 * identity.layout.nbytes(identity.block_tokens) + MAX_ENVELOPE_BYTES + _SLACK
        settling: dict[RecordKey, asyncio.Task[str]] = {}

        def came(name: str, value: Value) -> None:
            settling[asked[name]] = self._errands.start(
                "arrival", self._take_in(namespace, generation, asked[name], name, value)
            )

        try:
            async with self._fetching:
                there = await self._caller.get(list(asked), most, came)
            for (name, key), answer in zip(asked.items(), there, strict=True):
                if answer is False:
                    self._presence.note(name, there=False)
                    outcomes[key] = fig.MISS
                elif isinstance(answer, Exception):
                    _log.debug("record %s was not fetched: %s", log_name(key), answer)
        finally:
            for key, task in settling.items():
                outcomes[key] = await task

    async def _take_in(
        self, namespace: Namespace, generation: int, key: RecordKey, name: str, value: Value
    ) -> str:
        """Check what came under the name of a record, and settle it in; return what became of it."""
        self._figures.bytes.labels("in").inc(len(value))
        try:
            found = parcels.opened(
                value, key, namespace, self._registry.tenants[namespace.tenant], generation
            )
            gone = self._generations.current(namespace) != generation or self._presence.ask(name) is False
            if found is None or gone or not self._registry.admits(namespace):
                self._presence.note(name, there=False)  # its time is over, or it was deleted or purged
                return fig.MISS
            self._presence.note(name, there=True)
            return fig.HIT if await self._settle_in(namespace, key, *found) else fig.FAILED
        except Corrupt as error:
            self._refuse(name, namespace, key, error)
            return fig.REFUSED

    def _refuse(self, name: str, namespace: Namespace, key: RecordKey, error: Corrupt) -> None:
        """Count what is no record of ours, and remove it: else no daemon would store a sound one there."""
        self._figures.refused.labels(type(error).__name__).inc()
        self._presence.note(name, there=False)
        _log.warning(
            "record %s of namespace %s, tenant %s, in the remote store is refused: %s",
            log_name(key), namespace.name, namespace.tenant, error,
        )  # fmt: skip
        _ = self._errands.start("refusal", self._caller.delete([name]), expected=(RemoteFailed,))

    async def _settle_in(
        self, namespace: Namespace, key: RecordKey, record: Record, envelope: Envelope
    ) -> bool:
        """Put a record into host memory as the packed copy of a new block; tell whether it is here.

        Raises:
            Corrupt: its blob is not the one that was sealed.
        """
        blob, tenant = record.bytes, self._registry.tenants[namespace.tenant]
        origin = Origin.of(namespace, envelope, record.envelope)
        expires = envelope.expires
        ttl = None if expires is None else max(1, (expires - time.time_ns() // 1_000_000) // 1000)

        def event(ticket: int) -> ev.Put:
            return ev.Put(
                ticket, key, namespace.number, envelope.tokens, envelope.raw_bytes, envelope.parent,
                position=envelope.first_token or 0, arrival=Arrival(len(blob), ttl),
            )  # fmt: skip

        def granted(_: ev.Grant) -> None:
            self._memory.allocate(key, len(blob), Form.PACKED)
            self._driver.origins[key] = origin

        request = Request(event, granted, lambda _: ev.Abandoned(key, Place.PACKED))
        try:
            reason = await self._driver.ask(request, asyncio.get_running_loop().time() + ROOM_S)
        except DeadlineExceeded:
            return False
        if reason is not None:
            return reason is Reason.DUPLICATE
        try:
            pieces = self._memory.pieces(key, Form.PACKED)
            if len(blob) <= AT_HAND:
                parcels.lay(record, envelope, tenant, pieces)
            else:
                await self._lane.run(parcels.lay, record, envelope, tenant, pieces)
        except BaseException:
            self._driver.tell(ev.Abandoned(key, Place.PACKED))
            raise
        self._driver.tell(ev.Filled(key, Place.PACKED))
        return True
