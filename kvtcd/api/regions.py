"""Memory that clients share with the daemon, and what bounds it."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvtcd.core.errors import BadRequest, Busy, NotFound, TooLarge
from kvtcd.core.regions import REGION, SEALS, Grant, Span
from kvtcd.engine.lanes import Lane

T = TypeVar("T")


class Region:
    """A memfd of a client, mapped here. It is unmapped when nobody refers to it any more.

    The client can write to it at any time: what is read is copied once, and only the copy is believed.

    Args:
        fd: of the memfd. It stays the caller's.
        limit: bytes that it may have.

    Raises:
        BadRequest: it is no memfd, or not sealed.
        TooLarge: it is over the limit.
    """

    def __init__(self, fd: int, limit: int) -> None:
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            raise BadRequest("descriptor", "is not of a memfd") from None
        if not sealed:
            raise BadRequest("descriptor", "is not sealed against shrinking, growing and further seals")
        if (nbytes := os.fstat(fd).st_size) > limit:
            raise TooLarge("region", nbytes, limit)
        try:
            self.memory = memoryview(mmap.mmap(fd, nbytes))
        except (OSError, ValueError) as error:
            raise BadRequest("descriptor", f"cannot be mapped: {error}") from None
        self._copies = 0
        self._idle: Callable[[], None] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let it not be idle meanwhile.

        Raises:
            NotFound: it has ended.
        """
        if self._idle is not None:
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


class Part:
    """What a request names of a region."""

    def __init__(self, region: Region, span: Span, lane: Lane) -> None:
        end = span.offset + span.length
        if end > len(region.memory):
            raise BadRequest("offset", f"a part ends at {end}, and the region at {len(region.memory)}")
        self._region, self._lane = region, lane
        self._memory = region.memory[span.offset : end]

    async def copy(self, call: Callable[[memoryview], T]) -> T:
        """Copy into or out of its memory, off the loop.

        It ends before the caller does, even if that is cancelled: right after, what it writes to may be
        another's.

        Raises:
            NotFound: the region has ended.
        """
        with self._region.in_use():
            running = asyncio.ensure_future(self._lane.run(call, self._memory))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                while not running.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([running])
                raise


class Regions:
    """The regions of all tenants.

    Args:
        count: regions of one tenant at once.
        nbytes: of all regions of one tenant; pages that only the daemon has touched count as its own memory.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self._count, self._nbytes = count, nbytes
        self._regions: dict[str, tuple[str, Region]] = {}
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._lane = Lane("regions")

    @property
    def nbytes(self) -> int:
        """The size of all of them together."""
        return self._sizes.total()

    def add(self, tenant: str, fd: int) -> Grant:
        """Map a memfd; say under which id its tenant can name it.

        Raises:
            Busy: the tenant has as many as it may.
            BadRequest, TooLarge: see `Region`.
        """
        if self._counts[tenant] >= self._count:
            raise Busy("the number of regions")
        region = Region(fd, self._nbytes - self._sizes[tenant])
        grant = Grant(secrets.token_hex(16), len(region.memory))
        self._regions[grant.region] = tenant, region
        self._counts[tenant] += 1
        self._sizes[tenant] += grant.nbytes
        return grant

    def remove(self, name: str, idle: Callable[[], None]) -> None:
        """Forget a region: no copy of it begins any more. `idle` is called once none is under way."""
        tenant, region = self._regions.pop(name)
        self._counts[tenant] -= 1
        self._sizes[tenant] -= len(region.memory)
        if not self._counts[tenant]:
            del self._counts[tenant], self._sizes[tenant]
        region.end(idle)

    def part(self, tenant: str, name: str, span: Span) -> Part:
        """Return a part of a region of a tenant.

        Raises:
            NotFound: it has none of that id, or it has ended.
            BadRequest: the part is not all in it.
        """
        owner, region = self._regions.get(name, (None, None))
        if region is None or owner != tenant:
            raise NotFound(REGION)
        return Part(region, span, self._lane)

    async def close(self) -> None:
        """Wait for copies, and end."""
        await self._lane.close()
