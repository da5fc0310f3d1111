"""Write-behind: what was packed here goes to the store when its turn comes, and nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtcd.core.errors import RemoteFailed, RemoteLeftAlone
from kvtcd.core.keys import RecordKey
from kvtcd.core.remote import names
from kvtcd.core.remote.backlog import Backlog, Offer, Waiting
from kvtcd.core.remote.presence import Presence
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.ports import Item
from kvtcd.engine.remote import figures as fig
from kvtcd.engine.remote import parcels
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures
from kvtcd.engine.remote.generations import Generations
from kvtcd.engine.remote.questions import Questions
from kvtcd.engine.remote.upkeep import Upkeep
from kvtcd.engine.steps import Record

WRITERS = 2
"""Batches under way: one is made ready while another is sent."""
BATCH, BATCH_BYTES = 32, 8 << 20
RESUME_S = 1.0
"""Seconds until what could not be written is tried again, if the store is asked at all by then."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A record that is to leave, and the key of the block that it continues."""

    key: RecordKey
    parent: RecordKey | None
    record: Record
    namespace: Namespace
    tenant: Tenant


class Writing:
    """The queue and who empties it. All methods belong to the loop.

    While the store is left alone nothing is taken from the queue, and what could not be written goes back.
    After a call that failed blocks go one by one until one is taken, so that a block which makes every call
    fail is found out, and costs no other.

    Args:
        caller: of the store.
        generations: that records are written under.
        upkeep: of the profiles that what is written is packed with.
        questions: what is there already is not sent.
        presence: told of what is there from then on.
        registry: of namespaces.
        lane: on which records are made ready.
        figures: told of all of it.
        capacity: bytes that wait at most.
        attempts: how often a block may be refused on its own account.
        ttl: seconds that a record is kept, None: as long as the store likes.
        encrypt: encrypt what is not.

    Attributes:
        written: told of each block that the store has from now on.
    """

    def __init__(
        self, caller: Caller, generations: Generations, upkeep: Upkeep, questions: Questions,
        presence: Presence, *, registry: Registry, lane: Lane, figures: Figures, capacity: int,
        attempts: int = 3, ttl: int | None, encrypt: bool,
    ) -> None:  # fmt: skip
        self._caller, self._generations, self._upkeep = caller, generations, upkeep
        self._questions, self._presence = questions, presence
        self._registry, self._lane, self._figures = registry, lane, figures
        self._ttl, self._encrypt, self._capacity = ttl, encrypt, capacity
        self.written: Callable[[Parcel], None] = _nobody
        self._backlog: Backlog[Parcel] = Backlog(capacity, attempts=attempts)
        self._offered, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._most = BATCH
        self._resuming = False

    def offer(self, parcel: Parcel) -> None:
        """Let a record wait to be written, if there is room."""
        record = parcel.record
        name = _waiting_name(parcel.tenant, parcel.namespace, parcel.key)
        outcome = self._backlog.offer(name, len(record.envelope) + len(record.blob), parcel)
        self._figures.offers.labels(outcome).inc()
        if outcome is Offer.TAKEN:
            self._offered.set()
            self._empty.clear()
        self._count()

    def forget(self, namespace: Namespace, keys: Sequence[RecordKey] | None = None) -> None:
        """Write some blocks of a namespace no more; `keys` None: all of them."""
        tenant = self._registry.tenants[namespace.tenant]
        if keys is None:
            prefix = names.prefix(tenant.keys, namespace.digest)
            gone = self._backlog.discard(lambda name: name.startswith(prefix))
        else:
            doomed = {_waiting_name(tenant, namespace, key) for key in keys}
            gone = self._backlog.discard(doomed.__contains__)
        self._figures.puts.labels(fig.UNWANTED).inc(gone)
        self._count()

    @property
    def crowded(self) -> bool:
        """Whether so much waits that only what is new should."""
        return 2 * self._backlog.nbytes > self._capacity

    @property
    def stuck(self) -> bool:
        """Whether all that waits has been tried, and could not be written."""
        return 0 < len(self._backlog) == self._backlog.aside

    @property
    def waiting(self) -> tuple[int, int]:
        """Blocks that wait or are being written, and their bytes."""
        return len(self._backlog), self._backlog.nbytes

    async def run(self) -> None:
        """Write what is offered, without end."""
        while True:
            if wait := max(self._caller.breaker.wait, self._caller.writes.wait):
                await asyncio.sleep(wait)
                continue
            batch = self._backlog.take(most=self._most, nbytes=BATCH_BYTES)
            if not batch:
                self._offered.clear()
                await self._offered.wait()
                continue
            try:
                await self._write(batch)
            except RemoteFailed as error:
                _log.debug("%d blocks were not written to the remote store: %s", len(batch), error)
                self._give_back(batch, own=False)
            except Exception:  # noqa: BLE001 - whatever it is costs these blocks, not those that come after
                _log.exception("unexpected failure while writing to the remote store")
                self._give_back(batch, own=True)
            self._count()

    async def drained(self) -> None:
        """Return when nothing waits."""
        await self._empty.wait()

    async def _write(self, batch: list[Waiting[Parcel]]) -> None:
        named: dict[str, Waiting[Parcel]] = {}
        follows: dict[str, str] = {}
        generations: dict[str, int] = {}
        parts: dict[int, list[Waiting[Parcel]]] = {}
        for one in batch:
            if self._registry.admits(one.item.namespace):
                parts.setdefault(one.item.namespace.number, []).append(one)
            else:
                self._backlog.settled(one)
        for part in parts.values():
            namespace = part[0].item.namespace
            try:
                generation = await self._generations.ensure(namespace)
            except RemoteFailed as error:  # others may be written all the same
                _log.debug("%d blocks were not written to the remote store: %s", len(part), error)
                self._give_back(part, own=False)
                continue
            self._upkeep.wanted(namespace)
            for one in part:
                keys, parent = one.item.tenant.keys, one.item.parent
                name = names.record_name(keys, namespace.digest, generation, one.item.key)
                named[name], generations[name] = one, generation
                if parent is not None:
                    follows[name] = names.record_name(keys, namespace.digest, generation, parent)
        absent = await self._absent(named, follows)
        ready = {name: (named[name].item, generations[name]) for name in absent}
        # Without a cipher that is a MAC over the envelope: a change of threads takes longer.
        items = await self._lane.run(self._ready, ready) if self._encrypt else self._ready(ready)
        if items:
            await self._send(items, named)

    async def _absent(self, named: dict[str, Waiting[Parcel]], follows: Mapping[str, str]) -> list[str]:
        """Return the names that the store has nothing under; the others need not be sent."""
        absent: list[str] = []
        for name, there in (await self._questions.answered(named, follows)).items():
            if isinstance(there, Exception):
                self._give_back([named[name]], own=False)
            elif there:
                self._presence.note(name, there=True)
                self._settled(named[name], fig.THERE, name)
            else:
                absent.append(name)
        return absent

    def _ready(self, parcels_by_name: dict[str, tuple[Parcel, int]]) -> list[Item]:
        return [
            (
                name,
                parcels.leaving(parcel.record, parcel.key, parcel.tenant, generation, encrypt=self._encrypt),
                self._ttl,
            )
            for name, (parcel, generation) in parcels_by_name.items()
        ]

    async def _send(self, items: list[Item], named: dict[str, Waiting[Parcel]]) -> None:
        try:
            answers = await self._caller.put(items)
        except RemoteLeftAlone:
            raise
        except RemoteFailed:
            self._most = 1
            if len(items) == 1:
                one = named[items[0][0]]
                self._give_back([one], own=self._backlog.alone(one))
            raise
        self._most = BATCH
        for (name, parts, _), error in zip(items, answers, strict=True):
            if error is not None:
                # Others were taken by the same call: this one was refused, or lies where nobody is asked now.
                self._give_back([named[name]], own=not isinstance(error, OSError))
                continue
            self._presence.note(name, there=True)
            self._figures.bytes.labels("out").inc(sum(map(len, parts)))
            if self._settled(named[name], fig.STORED, name):
                self.written(named[name].item)
            else:
                await self._caller.delete([name])  # deleted while it was under way

    def _settled(self, one: Waiting[Parcel], outcome: str, name: str) -> bool:
        wanted = self._backlog.settled(one)
        if wanted:
            self._figures.puts.labels(outcome).inc()
        else:
            self._presence.note(name, there=False)
        return wanted

    def _give_back(self, batch: list[Waiting[Parcel]], *, own: bool) -> None:
        """Have what could not be written wait again, but for what is given up."""
        for one in batch:
            if self._backlog.wants(one) and not self._backlog.again(one, own=own):
                self._figures.puts.labels(fig.FAILED).inc()
        if self._backlog.aside and not self._resuming:
            self._resuming = True
            asyncio.get_running_loop().call_later(RESUME_S, self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._backlog.resume()
        self._offered.set()

    def _count(self) -> None:
        blocks, nbytes = self.waiting
        self._figures.queue_blocks.set(blocks)
        self._figures.queue_bytes.set(nbytes)
        if not blocks:
            self._empty.set()


def _nobody(_: Parcel) -> None:
    """Tell nobody."""


def _waiting_name(tenant: Tenant, namespace: Namespace, key: RecordKey) -> str:
    """Return the name that a record has in the queue: without a generation, which may not be known yet."""
    return names.prefix(tenant.keys, namespace.digest) + key.hex()
