"""Runs the catalog: tells it events, does what it answers, and wakes those who wait."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.devices import GpuName
from kvtcd.core.entry import State
from kvtcd.core.errors import DeadlineExceeded, StoreFailed
from kvtcd.core.events import Action, Event, Grant, Move
from kvtcd.core.keys import RecordKey, log_name
from kvtcd.core.place import MEMORY, Place
from kvtcd.core.reason import Reason
from kvtcd.engine.errands import Errands
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover, Outcome
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.ports import DeviceMemory, Memory
from kvtcd.engine.steps import Origin
from kvtcd.engine.unpacking import Packed

_log = logging.getLogger(__name__)

Observer = Callable[[Event, Sequence[Action]], None]
"""Told of each event and of what the catalog answered, before any of it is done."""


@dataclass(frozen=True, slots=True)
class Request:
    """What someone asks of the catalog.

    Attributes:
        event: makes the event from a ticket.
        granted: run in the very turn of the grant.
        undo: what the catalog is told if the caller went away between grant and waking up.
        waits: run before waiting, if the answer is not there at once.
    """

    event: Callable[[int], Event]
    granted: Callable[[Grant], None] | None = None
    undo: Callable[[Grant], Event] | None = None
    waits: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Ticket:
    request: Request
    future: asyncio.Future[Grant | Reason]

    def reason(self) -> Reason | None:
        """Return why it was denied, None if it was granted; it has been answered."""
        answer = self.future.result()
        return None if isinstance(answer, Grant) else answer


class Driver:
    """Owns the catalog. Every method belongs to the loop; the catalog is touched nowhere else.

    Attributes:
        origins: what is known of each block that has bytes in memory; what lies on disk says so itself.
        undropped: records that could not be removed from disk.
        observers: told of all that happens.
    """

    def __init__(
        self,
        catalog: Catalog,
        memory: Memory,
        mover: Mover,
        registry: Registry,
        metrics: Metrics,
        *,
        gpus: Mapping[GpuName, DeviceMemory] = MappingProxyType({}),
    ) -> None:
        self.catalog = catalog
        self.origins: dict[RecordKey, Origin] = {}
        self.undropped: set[RecordKey] = set()
        self.observers: list[Observer] = []
        self._memory, self._mover, self._registry, self._metrics = memory, mover, registry, metrics
        self._gpus = gpus
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._errands = Errands(metrics)

    async def ask(self, request: Request, deadline: float) -> Reason | None:
        """Put a request to the catalog and wait: None when it is granted, else the reason why not.

        Args:
            request: what is asked.
            deadline: loop time to give up at.

        Raises:
            DeadlineExceeded: no answer in time; the request is withdrawn.
        """
        loop = asyncio.get_running_loop()
        number, asked = next(self._numbers), loop.time()
        ticket = self._tickets[number] = _Ticket(request, loop.create_future())
        self.tell(request.event(number))
        if ticket.future.done():  # as is most often so; a time limit costs as much as all of the catalog
            return ticket.reason()
        try:
            if request.waits:
                request.waits()
            async with asyncio.timeout_at(deadline):
                await ticket.future
        except TimeoutError:
            self._withdraw(number, ticket)
            raise DeadlineExceeded("the request", round(loop.time() - asked, 3)) from None
        except asyncio.CancelledError:
            self._withdraw(number, ticket)
            raise
        return ticket.reason()

    def _withdraw(self, number: int, ticket: _Ticket) -> None:
        """Take a request back; if it was granted without its caller noticing, undo the grant."""
        if self._tickets.pop(number, None):
            self.tell(ev.Cancel(number))
        elif ticket.future.done() and not ticket.future.cancelled():
            self._undo(ticket, ticket.future.result())

    def _undo(self, ticket: _Ticket, answer: Grant | Reason) -> None:
        if isinstance(answer, Grant) and ticket.request.undo is not None:
            self.tell(ticket.request.undo(answer))

    def tell(self, event: Event) -> None:
        """Tell the catalog an event, and do what it answers."""
        pending = [event]
        for told in pending:  # dropping bytes in memory ends at once, and is told in the same turn
            actions = self.catalog.handle(told)
            for observe in self.observers:
                observe(told, actions)
            for action in actions:
                match action:
                    case ev.Grant(ticket):
                        self._answer(ticket, action)
                    case ev.Deny(ticket, reason):
                        self._answer(ticket, reason)
                    case ev.Move():
                        self._start(action)
                    case ev.Drop(key, Place.DISK):
                        _ = self._errands.start("drop", self._drop(key, self._tenant_of(key)))
                    case ev.Drop(key, place, device):
                        self._free(key, place, device)
                        pending.append(ev.Dropped(key, place))
                    case ev.Lost(_, _, reason):
                        self._metrics.lost.labels(reason).inc()

    def _answer(self, number: int, answer: Grant | Reason) -> None:
        ticket = self._tickets.pop(number)
        if isinstance(answer, Grant) and ticket.request.granted:
            ticket.request.granted(answer)
        if ticket.future.done():  # cancelled, and its caller not yet awake to withdraw it
            asyncio.get_running_loop().call_soon(self._undo, ticket, answer)
        else:
            ticket.future.set_result(answer)

    def _start(self, move: Move) -> None:
        entry = self.catalog.residents.entries[move.key]
        namespace = self._namespace_of(move.key)
        tenant = self._registry.tenants[namespace.tenant]
        if move.target is Place.HOST:
            self._memory.allocate(move.key, entry.raw_bytes)
        elif move.target is Place.GPU and move.device:
            self._gpus[move.device].allocate(move.key, entry.raw_bytes)
        work = self._mover.move(move, namespace, tenant, self.origins.get(move.key))
        _ = self._errands.start("move", self._finish(move, work))

    async def land(self, key: RecordKey, source: Place, out: DeviceBytes) -> Reason | None:
        """Have a block, of which a copy is pinned, land in memory of its reader; tell why not, if so."""
        namespace = self._namespace_of(key)
        try:
            if source is Place.GPU:
                device = self.catalog.residents.gpus.where(key).device
                assert device is not None, "a shelf of the GPU tier has one"
                return await self._mover.deliver(key, namespace, device, out)
            tenant = self._registry.tenants[namespace.tenant]
            block = Packed(key, source, namespace, tenant, self.origins.get(key))
            return await self._mover.unpack(block, out)
        except Exception:  # noqa: BLE001 - as of a move; the block takes another way
            _log.exception("unexpected failure on the way of record %s from %s", log_name(key), source)
            self._metrics.internal_errors.labels("mover").inc()
            return Reason.FAILED

    def _free(self, key: RecordKey, place: Place, device: GpuName | None) -> None:
        if device:
            self._gpus[device].free(key)
        else:
            self._memory.free(key, place.form)
        if not any(self._lies(key, place) for place in MEMORY):
            self.origins.pop(key, None)

    def _lies(self, key: RecordKey, place: Place) -> bool:
        """Tell whether there are bytes in memory that do not go in this turn, in which several may."""
        residents = self.catalog.residents
        copy = residents.entries[key].at(place)
        return copy is not None and (copy.state is not State.DROPPING or residents.pins.at(key, place) > 0)

    async def _finish(self, move: Move, work: Coroutine[Any, Any, Outcome]) -> None:
        """Tell how a move ended. An unexpected failure costs one block, never the daemon."""
        try:
            outcome = await work
        except Exception:  # noqa: BLE001 - any failure of a move is one lost block, logged and counted
            _log.exception(
                "unexpected failure while moving record %s from %s to %s",
                log_name(move.key), move.source, move.target,
            )  # fmt: skip
            self._metrics.internal_errors.labels("mover").inc()
            outcome = Outcome(ev.MoveFailed(move.key))
        if outcome.origin:
            self.origins[move.key] = outcome.origin
        self.tell(outcome.event)

    async def _drop(self, key: RecordKey, tenant: Tenant) -> None:
        assert tenant.writer is not None, "a disk copy lies in an environment"
        try:
            if self._namespace_of(key).number not in self._registry.closing:  # else a rewrite leaves it out
                await tenant.writer.drop(key)
        except StoreFailed:
            # The record stays on disk, unaccounted until the next start, which takes it in again.
            self.undropped.add(key)
            self._metrics.internal_errors.labels("drop").inc()
        else:
            self.undropped.discard(key)
        self.tell(ev.Dropped(key, Place.DISK))

    def _namespace_of(self, key: RecordKey) -> Namespace:
        namespace = self._registry.numbered(self.catalog.residents.entries[key].namespace)
        assert namespace is not None, "a namespace outlives its blocks"
        return namespace

    def _tenant_of(self, key: RecordKey) -> Tenant:
        return self._registry.tenants[self._namespace_of(key).tenant]

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return len(self._tickets)

    async def idle(self) -> None:
        """Wait until no move and no drop runs."""
        await self._errands.ended()
