"""One region: who uses it, what a request names of it. Of host memory; `api/device_region.py` has others."""

from __future__ import annotations

import asyncio
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, Protocol, TypeVar

from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.device_errors import DeviceUnshared
from kvtcd.core.errors import BadRequest, DeadlineExceeded, NotFound, TooLarge
from kvtcd.core.regions import REGION, SEALS, Span
from kvtcd.engine.destination import Destination
from kvtcd.engine.lanes import Lane
from kvtcd.engine.sessions import Lease, Slot
from kvtcd.mapping import mapped

T = TypeVar("T")
ASK_S = 0.001
"""Time between two looks at whether a client is done with what he has queued."""
AT_ONCE = 1 << 20
"""Bytes of host memory that the loop copies itself: they take a tenth of a millisecond, which is less than
it takes to have another thread do it and to hear of it."""


class View(Protocol):
    """A part of a region. Its methods block, and return False where it is not time for that yet."""

    @property
    def there(self) -> DeviceBytes | None:
        """The part, where codecs can write it on a GPU; None: they cannot."""

    def ready(self) -> bool:
        """Tell whether its owner is done with what he has queued on it."""

    def fill(self, slot: Slot) -> bool:
        """Copy a block from it."""

    def take(self, lease: Lease) -> bool:
        """Copy a block to its beginning.

        Raises:
            BadRequest: it is too small.
        """


class Region(ABC):
    """Memory of a client that the daemon has open.

    Args:
        nbytes: of it.
        lane: on which it is copied.
    """

    kind: ClassVar[str]
    """As it is called in metrics."""
    at_once: ClassVar[int] = 0
    """Bytes that are copied on the loop."""

    def __init__(self, nbytes: int, lane: Lane) -> None:
        self.nbytes, self.lane = nbytes, lane
        self._copies = 0
        self._idle: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether nobody may use it any more."""
        return self._idle is not None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let it not be idle meanwhile.

        Raises:
            NotFound: it has ended.
        """
        if self.ended:
            raise NotFound(REGION)
        self._copies += 1
        try:
            yield
        finally:
            self._copies -= 1
            self._end()

    def end(self, idle: Callable[[], None]) -> None:
        """Let nobody use it any more, and call `idle` once nobody does."""
        self._idle = idle
        self._end()

    def _end(self) -> None:
        if self._idle is not None and not self._copies:
            self._idle()

    def part(self, span: Span) -> Part:
        """Return a part of it.

        Raises:
            BadRequest: the part is not all in it.
        """
        end = span.offset + span.length
        if end > self.nbytes:
            raise BadRequest("offset", f"a part ends at {end}, and the region at {self.nbytes}")
        return Part(self, self.view(span), off_loop=span.length > self.at_once)

    @abstractmethod
    def view(self, span: Span) -> View:
        """Return how a part of it is copied."""

    @abstractmethod
    def broken(self, error: DeviceUnshared) -> None:
        """Take note that it can be of no more use."""

    @abstractmethod
    async def release(self) -> None:
        """Let go of the memory; nobody uses it any more."""


class Part:
    """What a request names of a region."""

    def __init__(self, region: Region, view: View, *, off_loop: bool) -> None:
        self._region, self._view, self._off_loop = region, view, off_loop

    async def fill(self, slot: Slot, patience: float) -> None:
        """Copy a block from it; see `take`."""
        await self._do(partial(self._view.fill, slot), patience)

    async def take(self, lease: Lease, patience: float) -> None:
        """Copy a block to it, off the loop unless that takes no time.

        That ends before the caller does, even if he is cancelled: right after, what is written to may be
        another's.

        Args:
            lease: on the block; one that has landed is there already.
            patience: seconds that the client may take to be done with what he has queued.

        Raises:
            NotFound: the region has ended.
            BadRequest: the part is too small.
            DeadlineExceeded: the client was not done.
        """
        if not lease.landed:
            await self._do(partial(self._view.take, lease), patience)

    def destination(self, patience: float) -> Destination | None:
        """Return it as room for a block that is unpacked there; None where it has to be taken.

        `patience`: as of `take`.
        """
        there = self._view.there
        return None if there is None else _Room(self, there, patience)

    @asynccontextmanager
    async def held(self, patience: float) -> AsyncIterator[None]:
        """Have it to write to while it is entered; raises what `take` does."""
        with self._region.in_use():
            await self._done(self._view.ready, patience)
            yield

    async def _do(self, call: Callable[[], bool], patience: float) -> None:
        with self._region.in_use():
            await self._done(call, patience)

    async def _done(self, call: Callable[[], bool], patience: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        try:
            while not await self._run(call):
                if self._region.ended:
                    raise NotFound(REGION)
                if loop.time() >= until:
                    raise DeadlineExceeded("what was queued on the region before", patience)
                await asyncio.sleep(ASK_S)
        except DeviceUnshared as error:
            self._region.broken(error)
            raise NotFound(REGION) from error

    async def _run(self, call: Callable[[], bool]) -> bool:
        if not self._off_loop:
            await asyncio.sleep(0)  # between the blocks of a request others have their turn
            return call()
        running = asyncio.ensure_future(self._region.lane.run(call))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise


class _Room:
    """A part of a region on a GPU, as a `Destination`."""

    def __init__(self, part: Part, there: DeviceBytes, patience: float) -> None:
        self._part, self._there, self._patience = part, there, patience
        self.gpu = there.gpu

    @asynccontextmanager
    async def held(self, nbytes: int) -> AsyncIterator[DeviceBytes]:
        require_room(nbytes, self._there.nbytes)
        async with self._part.held(self._patience):
            yield replace(self._there, nbytes=nbytes)


def require_room(nbytes: int, there: int) -> None:
    """Refuse a part of `there` bytes that a block does not fit into.

    Raises:
        BadRequest: so it is.
    """
    if nbytes > there:
        raise BadRequest("length", f"{nbytes} bytes do not fit into {there}")


class HostRegion(Region):
    """A memfd of a client, mapped here. It is unmapped when nobody refers to it any more.

    The client can write to it at any time: what is read is copied once, and only the copy is believed.

    Args:
        fd: of the memfd. It stays the caller's.
        limit: bytes that it may have.
        lane: on which it is copied.

    Raises:
        BadRequest: it is no memfd, or not sealed.
        TooLarge: it is over the limit.
    """

    kind = "host"
    at_once = AT_ONCE

    def __init__(self, fd: int, limit: int, lane: Lane) -> None:
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            raise BadRequest("descriptor", "is not of a memfd") from None
        if not sealed:
            raise BadRequest("descriptor", "is not sealed against shrinking, growing and further seals")
        if (nbytes := os.fstat(fd).st_size) > limit:
            raise TooLarge("region", nbytes, limit)
        try:
            self._memory = memoryview(mapped(fd, nbytes))
        except (OSError, ValueError) as error:
            raise BadRequest("descriptor", f"cannot be mapped: {error}") from None
        super().__init__(nbytes, lane)

    def view(self, span: Span) -> View:
        """Return how a part of it is copied."""
        return _HostView(self._memory[span.offset : span.offset + span.length])

    def broken(self, error: DeviceUnshared) -> None:
        """Never called: nothing can break it."""

    async def release(self) -> None:
        """Do nothing: it is unmapped by itself."""


class _HostView:
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.there = None

    def ready(self) -> bool:
        return True

    def fill(self, slot: Slot) -> bool:
        slot.write(self._memory)
        return True

    def take(self, lease: Lease) -> bool:
        lease.copy_to(self._memory)
        return True
