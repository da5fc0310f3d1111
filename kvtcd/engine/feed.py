"""The last notices of each tenant who listens, and those who read them. Nobody who reads slowly holds memory.

A listener is a place in the tenant's ring, not a queue: who falls out of the ring is told so, and goes on at
its end. A tenant who has never listened has no ring, and nothing is remembered for him.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice

from kvtcd.core.errors import Busy, Stopping
from kvtcd.core.notices import Notice, What
from kvtcd.engine.metrics import Metrics

RING = 8192
"""Notices remembered for each tenant who has listened."""
LISTENERS = 16
"""Listeners of one tenant."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_PART = 256
"""Notices handed out at once."""


class Feed:
    """The last notices of one tenant, numbered from the start of the daemon.

    Args:
        boot_id: part of the ids, so that those of an earlier daemon are known as such.
        size: notices to remember.
    """

    def __init__(self, boot_id: str, size: int = RING) -> None:
        self._boot_id = boot_id
        self._ring: deque[Notice] = deque(maxlen=size)
        self._end = 0
        """Notices so far."""
        self._news = asyncio.Event()
        self.listeners = 0
        self.closed = False

    def publish(self, notice: Notice) -> None:
        """Remember a notice, and wake those who wait for one."""
        self._ring.append(notice)
        self._end += 1
        self._wake()

    def close(self) -> None:
        """Let every listener come to an end."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def place(self, last_id: str | None) -> int:
        """Return how many notices came up to that of an id: -1 if that is not known any more."""
        if last_id is None:
            return self._end
        boot_id, _, number = last_id.rpartition("-")
        known = boot_id == self._boot_id and _NUMBER.fullmatch(number) and int(number) <= self._end
        return int(number) if known else -1

    def after(self, place: int) -> tuple[list[Notice], int]:
        """Return some notices from a place on, each with its id, and the place to go on from.

        For a place that is not in the ring any more that is one `OVERFLOW`, and the end of the ring.
        """
        begin = self._end - len(self._ring)
        if place < begin:
            return [Notice(What.OVERFLOW, self._id(self._end))], self._end
        found = islice(self._ring, place - begin, place - begin + _PART)
        notices = [replace(notice, id=self._id(number)) for number, notice in enumerate(found, place + 1)]
        return notices, place + len(notices)

    def _id(self, place: int) -> str:
        return f"{self._boot_id}-{place}"

    async def news(self, seconds: float) -> None:
        """Return when there is something new, and after `seconds` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()


class Listener:
    """A place in a feed.

    Args:
        feed: of the tenant.
        namespace: leave out what is about other namespaces; None: about none.
        place: where to begin.
        metrics: told of overflows.
    """

    def __init__(self, feed: Feed, namespace: str | None, place: int, metrics: Metrics) -> None:
        self._feed, self._namespace, self._place, self._metrics = feed, namespace, place, metrics

    async def take(self, seconds: float) -> list[Notice] | None:
        """Return the next notices, an empty list if none come for `seconds`, None at the end of the feed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            notices, self._place = self._feed.after(self._place)
            wanted = [notice for notice in notices if self._wants(notice)]
            if wanted:
                self._metrics.overflows.inc(sum(notice.what is What.OVERFLOW for notice in wanted))
                return wanted
            if notices:
                await asyncio.sleep(0)  # a ring full of others' notices must not hold the loop
            elif self._feed.closed:
                return None
            elif loop.time() >= until:
                return []
            else:
                await self._feed.news(until - loop.time())

    def _wants(self, notice: Notice) -> bool:
        return self._namespace is None or notice.namespace in {None, self._namespace}


class Feeds:
    """The feeds of all tenants.

    Args:
        boot_id: of this daemon.
        metrics: told of notices and listeners.
    """

    def __init__(self, boot_id: str, metrics: Metrics) -> None:
        self._boot_id, self._metrics = boot_id, metrics
        self._feeds: dict[str, Feed] = {}
        self._closed = False

    def watched(self, tenant: str) -> bool:
        """Tell whether notices of a tenant are remembered."""
        return tenant in self._feeds

    def publish(self, tenant: str, notice: Notice) -> None:
        """Remember a notice, if this tenant has ever listened."""
        if feed := self._feeds.get(tenant):
            self._metrics.notices.labels(notice.what).inc()
            feed.publish(notice)

    @contextmanager
    def listen(self, tenant: str, namespace: str | None, last_id: str | None) -> Iterator[Listener]:
        """Listen to the notices of a tenant.

        Args:
            tenant: whose.
            namespace: only of this one.
            last_id: go on after the notice of this id; None: with what happens from now on.

        Raises:
            Busy: `LISTENERS` of this tenant listen already.
            Stopping: the daemon ends.
        """
        if self._closed:
            raise Stopping
        feed = self._feeds.get(tenant) or self._feeds.setdefault(tenant, Feed(self._boot_id))
        if feed.listeners >= LISTENERS:
            raise Busy("the number of listeners")
        feed.listeners += 1
        self._metrics.listeners.inc()
        try:
            yield Listener(feed, namespace, feed.place(last_id), self._metrics)
        finally:
            feed.listeners -= 1
            self._metrics.listeners.dec()

    def close(self) -> None:
        """Let every listener come to an end, and let nobody listen any more."""
        self._closed = True
        for feed in self._feeds.values():
            feed.close()
