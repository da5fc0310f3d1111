"""Runs the catalog: tells it events, does what it answers, and wakes those who wait."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvtcd.core import events as ev
from kvtcd.core.catalog import Catalog
from kvtcd.core.errors import DeadlineExceeded, StoreFailed
from kvtcd.core.events import Event, Move, Reason, Tier
from kvtcd.core.keys import RecordKey
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover, Origin
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.ports import Memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Someone who waits, and what to tell the catalog if he went away just as he was granted."""

    future: asyncio.Future[Reason | None]
    undo: Event | None


class Driver:
    """Owns the catalog. Every method belongs to the loop; the catalog is touched nowhere else.

    Attributes:
        origins: what is known of each block that has host bytes; what lies on disk says so itself.
    """

    def __init__(
        self, catalog: Catalog, memory: Memory, mover: Mover, registry: Registry, metrics: Metrics
    ) -> None:
        self.catalog = catalog
        self.origins: dict[RecordKey, Origin] = {}
        self._memory, self._mover, self._registry, self._metrics = memory, mover, registry, metrics
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, request: Callable[[int], Event], deadline: float, undo: Event | None = None) -> Reason | None:
        """Put a request to the catalog and wait for its answer: None when granted, else the reason.

        Args:
            request: makes the event from a ticket.
            deadline: loop time to give up at.
            undo: told to the catalog if the caller went away between grant and waking up.

        Raises:
            DeadlineExceeded: no answer in time; the request is withdrawn.
        """
        loop = asyncio.get_running_loop()
        number, future = next(self._numbers), loop.create_future()
        self._tickets[number] = _Ticket(future, undo)
        asked = loop.time()
        self.tell(request(number))
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            self._withdraw(number, future, undo)
            raise DeadlineExceeded("the request", round(loop.time() - asked, 3)) from None
        except asyncio.CancelledError:
            self._withdraw(number, future, undo)
            raise

    def _withdraw(self, number: int, future: asyncio.Future[Reason | None], undo: Event | None) -> None:
        if self._tickets.pop(number, None):
            self.tell(ev.Cancel(number))
        elif future.done() and not future.cancelled() and future.result() is None and undo is not None:
            self.tell(undo)

    def tell(self, event: Event) -> None:
        """Tell the catalog an event, and do what it answers."""
        pending = [event]
        for told in pending:  # dropping host bytes ends at once, and is told in the same turn
            for action in self.catalog.handle(told):
                match action:
                    case ev.Grant(ticket):
                        self._answer(ticket, None)
                    case ev.Deny(ticket, reason):
                        self._answer(ticket, reason)
                    case ev.Move():
                        self._start(action)
                    case ev.Drop(key, Tier.HOST):
                        self._memory.free(key)
                        self.origins.pop(key, None)
                        pending.append(ev.Dropped(key, Tier.HOST))
                    case ev.Drop(key, _):
                        self._spawn(self._drop(key, self._tenant_of(key)))
                    case ev.Lost(_, _, reason):
                        self._metrics.lost.labels(reason).inc()

    def _answer(self, ticket: int, reason: Reason | None) -> None:
        waiting = self._tickets.pop(ticket)
        if not waiting.future.done():
            waiting.future.set_result(reason)
        elif reason is None and waiting.undo is not None:
            # Cancelled while waiting, and not yet awake to withdraw.
            asyncio.get_running_loop().call_soon(self.tell, waiting.undo)

    def _start(self, move: Move) -> None:
        entry = self.catalog.residents.entries[move.key]
        if move.target is Tier.HOST:
            self._memory.allocate(move.key, entry.raw_bytes)
            self._spawn(self._promote(move, self._namespace_of(move.key)))
        else:
            self._spawn(self._demote(move, self.origins[move.key]))

    async def _demote(self, move: Move, origin: Origin) -> None:
        tenant = self._registry.tenants[origin.namespace.tenant]
        self.tell(await self._guarded(self._mover.demote(move, origin, tenant), move))

    async def _promote(self, move: Move, namespace: Namespace) -> None:
        tenant = self._registry.tenants[namespace.tenant]
        outcome = await self._guarded(self._mover.promote(move, namespace, tenant), move)
        if isinstance(outcome, tuple):
            outcome, envelope = outcome
            if envelope is not None:
                self.origins[move.key] = Origin(
                    namespace, envelope.engine_key, envelope.salt, envelope.parent, envelope.first_token,
                    envelope.tokens, envelope.raw_bytes, envelope.created,
                )  # fmt: skip
        self.tell(outcome)

    async def _guarded(self, work, move: Move):  # noqa: ANN001, ANN202 - typed by its two callers
        """Turn an unexpected failure into a failed move: one block is lost, the daemon goes on."""
        try:
            return await work
        except Exception:
            _log.exception("unexpected failure while moving a block from %s to %s", move.source, move.target)
            self._metrics.internal_errors.labels("mover").inc()
            return ev.MoveFailed(move.key)

    async def _drop(self, key: RecordKey, tenant: Tenant) -> None:
        assert tenant.writer is not None, "a disk copy lies in an environment"
        try:
            await tenant.writer.drop(key)
        except StoreFailed:
            # The record stays on disk, unaccounted until the next start, which takes it in again.
            self._metrics.internal_errors.labels("drop").inc()
        self.tell(ev.Dropped(key, Tier.DISK))

    def _namespace_of(self, key: RecordKey) -> Namespace:
        namespace = self._registry.numbered(self.catalog.residents.entries[key].namespace)
        assert namespace is not None, "a namespace outlives its blocks"
        return namespace

    def _tenant_of(self, key: RecordKey) -> Tenant:
        return self._registry.tenants[self._namespace_of(key).tenant]

    def _spawn(self, work) -> None:  # noqa: ANN001 - a coroutine of this class
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Wait until no move and no drop runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)
