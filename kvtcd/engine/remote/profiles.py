"""Profiles travel: content-addressed, ahead of the blocks that are packed with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvtcd.core.errors import Corrupt, KvtcdError, RemoteFailed
from kvtcd.core.remote import names
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Value
from kvtcd.engine.remote import figures as fig
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures

_MOST_BYTES = 1 << 30
_MISSING_S = 60.0
"""For how long a profile that the store does not have is not asked for again."""
_log = logging.getLogger(__name__)


class Shelf(Protocol):
    """The profiles that are here. Blocking."""

    def read(self, digest: bytes) -> bytes:
        """Return the content of a profile.

        Raises:
            UnknownProfile: it is not here.
        """

    def add(self, digest: bytes, content: Value) -> None:
        """Keep a profile with this SHA-256.

        Raises:
            Corrupt: it is none.
        """


class Profiles:
    """Sends the profiles of namespaces, and fetches those that blobs name. All methods belong to the loop.

    Args:
        caller: of the store.
        shelf: the profiles that are here.
        lane: on which they are read and written.
        figures: told of each.
        ttl: seconds that records are kept: a profile is written again before half of it is over.

    Attributes:
        arrived: told that one came here.
    """

    def __init__(
        self, caller: Caller, shelf: Shelf, lane: Lane, figures: Figures, *, ttl: int | None
    ) -> None:
        self._caller, self._shelf, self._lane, self._figures = caller, shelf, lane, figures
        self._ttl = ttl
        self.arrived: Callable[[], object] = _nobody
        self._due: dict[bytes, float] = {}
        self._missing: dict[bytes, float] = {}
        self._fetching: dict[bytes, asyncio.Task[bool]] = {}

    async def send(self, namespace: Namespace) -> None:
        """Have the store hold the profile that a namespace is packed with.

        Raises:
            RemoteFailed: that could not be done now.
        """
        if namespace.codec.profile is None:
            return
        digest, now = bytes.fromhex(namespace.codec.profile), asyncio.get_running_loop().time()
        if now < self._due.get(digest, 0.0):
            return
        try:
            content = await self._lane.run(self._shelf.read, digest)
        except KvtcdError as error:
            _log.warning("profile %s cannot be sent to the remote store: %s", digest.hex(), error)
            return
        (failed,) = await self._caller.put([(names.profile_name(digest), (content,), self._ttl)])
        if failed is not None:
            raise RemoteFailed("put", str(failed))
        self._due[digest] = now + (self._ttl / 2 if self._ttl else float("inf"))
        self._figures.profiles.labels(fig.STORED).inc()

    async def fetch(self, digest: bytes) -> bool:
        """Bring a profile here; tell whether it is. Who asks for the same one waits for the same answer."""
        if asyncio.get_running_loop().time() < self._missing.get(digest, 0.0):
            return False
        if digest not in self._fetching:
            task = asyncio.create_task(self._fetch(digest), name="kvtcd-profile")
            self._fetching[digest] = task
            task.add_done_callback(lambda _: self._fetching.pop(digest))
        return await asyncio.shield(self._fetching[digest])

    async def _fetch(self, digest: bytes) -> bool:
        outcome = fig.FAILED
        try:
            content = await self._caller.value(names.profile_name(digest), _MOST_BYTES)
            if content is None:
                outcome = fig.MISS
            else:
                await self._lane.run(self._shelf.add, digest, content)
                outcome = fig.HIT
                _log.info("profile %s was fetched from the remote store", digest.hex())
                self.arrived()
        except RemoteFailed as error:
            _log.warning("profile %s cannot be fetched: %s", digest.hex(), error)
        except Corrupt as error:
            outcome = fig.REFUSED
            self._figures.refused.labels(type(error).__name__).inc()
            _log.warning("profile %s in the remote store is refused: %s", digest.hex(), error)
        except OSError as error:
            _log.warning("profile %s cannot be kept: %s", digest.hex(), error)
        if outcome != fig.HIT:
            self._missing[digest] = asyncio.get_running_loop().time() + _MISSING_S
        self._figures.profiles.labels(outcome).inc()
        return outcome == fig.HIT


def _nobody() -> None:
    """Tell nobody."""
