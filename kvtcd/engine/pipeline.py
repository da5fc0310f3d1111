"""Blocks on their way through the stages of a pipeline: overlapping, in order, in a ring of buffers."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, Generic, Protocol, TypeVar

from kvtcd.engine.streams import Stage, Stream, Watch, came, occurred
from kvtcd.engine.timeline import Span

T = TypeVar("T")
U = TypeVar("U")


class Slot(Protocol):
    """The memory of one block in flight."""

    def clear(self) -> None:
        """Be ready for the next block."""


S = TypeVar("S", bound=Slot)


class Pipeline(Generic[S]):
    """A ring of slots. Who finds none free waits, first come first served, and holds nothing meanwhile.

    Args:
        name: for those who watch.
        slots: two let neighbouring stages overlap, three hide that stages take unequal time.
        observers: told of every stage when it has ended, on the thread that saw it end, in the context (PEP
            567) in which it was submitted.
    """

    def __init__(
        self, name: str, slots: Sequence[S], observers: Sequence[Callable[[Span], None]] = ()
    ) -> None:
        self.name = name
        self._observers = tuple(observers)
        self._numbers = itertools.count()
        self._free: asyncio.Queue[S] = asyncio.Queue()
        for slot in slots:
            self._free.put_nowait(slot)

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Flight[S]]:
        """Take a slot for one block, and give it back when nothing touches it any more.

        Leaving early, by an exception or because the caller is cancelled, leaves out the stages that have not
        begun and waits for the one that runs: afterwards neither the slot nor what the stages were given is
        in use.
        """
        slot = await self._free.get()
        flight = Flight(slot, next(self._numbers), self)
        try:
            yield flight
        finally:
            try:
                await flight.settle()
            finally:
                slot.clear()
                self._free.put_nowait(slot)

    def watch(self, stage: str, block: int) -> Watch | None:
        """Return who is told of one stage of one block; None when nobody listens."""
        if not self._observers:
            return None

        context = copy_context()  # of who moves the block, of which the thread where it ends knows nothing

        def tell(begin: float, end: float) -> None:
            span = Span(self.name, stage, block, threading.current_thread().name, begin, end)
            for observe in self._observers:
                context.run(observe, span)

        return tell


class Flight(Generic[S]):
    """One block in a pipeline, with its slot."""

    def __init__(self, slot: S, number: int, pipeline: Pipeline[S]) -> None:
        self.slot, self.number = slot, number
        self._pipeline = pipeline
        self._events: list[tuple[Stream, Future[Any]]] = []
        self._left = False

    def begin(self, stage: Stage, call: Callable[[], T]) -> Step[T]:
        """Submit the first stage."""
        return Step(occurred(None), self).then(stage, lambda _: call())

    def submit(self, stage: Stage, call: Callable[[T], U], after: Future[T]) -> Future[U]:
        """Submit a stage behind an event of this flight."""

        def unless_left(value: T) -> U:
            if self._left:
                raise CancelledError
            return call(value)

        watch = self._pipeline.watch(stage.name, self.number)
        event = stage.stream.submit(unless_left, after, watch)
        self._events.append((stage.stream, event))  # and what the stage yields, until the flight has ended
        return event

    async def settle(self) -> None:
        """Begin no further stage; return, or be cancelled, only when none runs."""
        self._left = True
        cancelled: asyncio.CancelledError | None = None
        while running := next((event for _, event in self._events if not event.done()), None):
            try:
                await came(running)
            except asyncio.CancelledError as error:
                cancelled = error
        for stream, event in self._events:
            stream.release(event)
        if cancelled is not None:
            raise cancelled


class Step(Generic[T]):
    """What a stage will yield."""

    def __init__(self, event: Future[T], flight: Flight[Any]) -> None:
        self._event, self._flight = event, flight

    def then(self, stage: Stage, call: Callable[[T], U]) -> Step[U]:
        """Submit the next stage, a call of what this one yields."""
        return Step(self._flight.submit(stage, call, self._event), self._flight)

    async def end(self) -> T:
        """Wait for the stage to end; return what it yields, or raise what it or one before it raised."""
        await came(self._event)
        return self._event.result()
