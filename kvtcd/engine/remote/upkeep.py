"""Keeps a store supplied with the profiles of what is written to it: part by part, beside the blocks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress

from kvtcd.core.errors import BadMagic, Corrupt, KvtcdError, RemoteFailed, UnknownProfile, WrongRecord
from kvtcd.core.remote import names
from kvtcd.core.remote.breaker import pause
from kvtcd.core.remote.manifest import MOST_MANIFEST, PART_BYTES, Manifest, count_of, require_header
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Value
from kvtcd.engine.remote import figures as fig
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures
from kvtcd.engine.remote.folder import Folder

_FIRST_S, _LONGEST_S = 0.5, 30.0
"""Pauses after a failure."""
_ABSENT_S = 60.0
"""Pause after a profile could not be read here."""
_SHORTEST_S = 1.0
_ASKED = 256
"""Names of one call."""
_log = logging.getLogger(__name__)


class Upkeep:
    """Sends what a store lacks of profiles, looks again from time to time, and sends what it has lost.

    One part is under way at a time, each with the time limit of a call, so a profile goes up as fast as the
    link carries it beside the blocks; what is there already, also from before an outage, is not sent again.
    All methods belong to the loop.

    Args:
        caller: of the store.
        folder: the profiles that are here.
        lane: on which they are read.
        figures: told of each.
        every: seconds between two looks.
        ttl: seconds that records are kept: all is written again before half of it is over.
        luck: see `pause`.

    Attributes:
        left: parts of the profile under way that the store still lacks.
    """

    def __init__(
        self, caller: Caller, folder: Folder, lane: Lane, figures: Figures, *, every: float, ttl: int | None,
        luck: Callable[[], float],
    ) -> None:  # fmt: skip
        self._caller, self._folder, self._lane = caller, folder, lane
        self._figures, self._luck = figures, luck
        self._every, self._ttl = max(every, _SHORTEST_S), ttl
        self.left = 0
        self._due: dict[bytes, float] = {}
        self._renewals: dict[bytes, float] = {}
        self._failed: dict[bytes, int] = {}
        self._unsent: set[bytes] = set()
        self._manifests: dict[bytes, Manifest] = {}
        self._woken, self._settled = asyncio.Event(), asyncio.Event()
        self._settled.set()

    def wanted(self, namespace: Namespace) -> None:
        """Have the store hold the profile that a namespace is packed with, from now on."""
        if namespace.codec.profile is None:
            return
        digest = bytes.fromhex(namespace.codec.profile)
        if digest not in self._due:
            self._due[digest] = 0.0
            self._unsent.add(digest)
            self._settled.clear()
            self._woken.set()

    async def settled(self) -> None:
        """Return when the store has held each of them."""
        await self._settled.wait()

    async def run(self) -> None:
        """Do that, without end."""
        loop = asyncio.get_running_loop()
        while True:
            digest = min(self._due, key=self._due.__getitem__, default=None)
            wait = None if digest is None else self._due[digest] - loop.time()
            if digest is None or wait is None or wait > 0:
                self._woken.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._woken.wait()
                continue
            self._due[digest] = loop.time() + await self._kept(digest)

    async def _kept(self, digest: bytes) -> float:
        """Have the store hold a profile; return the seconds until the next look."""
        try:
            await self._keep(digest)
        except RemoteFailed as error:
            failed = self._failed[digest] = self._failed.get(digest, 0) + 1
            _log.debug("profile %s was not sent to the remote store: %s", digest.hex(), error)
            return max(pause(failed, _FIRST_S, _LONGEST_S, self._luck), self._caller.writes.wait)
        except KvtcdError as error:
            self._figures.profiles.labels(fig.FAILED).inc()
            _log.warning("profile %s cannot be sent to the remote store: %s", digest.hex(), error)
            self._manifests.pop(digest, None)
            self._sent(digest)
            return max(self._every, _ABSENT_S)
        self._failed.pop(digest, None)
        self._sent(digest)
        return self._every

    def _sent(self, digest: bytes) -> None:
        self._unsent.discard(digest)
        if not self._unsent:
            self._settled.set()

    async def _keep(self, digest: bytes) -> None:
        if (manifest := self._manifests.get(digest)) is None:
            manifest = self._manifests[digest] = await self._manifest(digest)
        name, stated, now = names.profile_name(digest), manifest.to_bytes(), asyncio.get_running_loop().time()
        found = await self._caller.piece(name, 0, MOST_MANIFEST)
        later = now + (self._ttl / 2 if self._ttl else float("inf"))
        renew = now >= self._renewals.setdefault(digest, later)
        missing = [*range(len(manifest.digests))] if renew else await self._missing(manifest)
        self.left = len(missing)
        try:
            for number in missing:
                part = await self._lane.run(self._part, digest, manifest, number)
                await self._put(names.part_name(manifest.digests[number]), part)
                self.left -= 1
        finally:
            self.left = 0
        if renew or found != stated:
            self._note_foreign(digest, found, stated)
            await self._put(name, stated)
        if missing or found != stated:
            self._figures.profiles.labels(fig.STORED).inc()
            _log.info("profile %s is in the remote store: %d parts were sent", digest.hex(), len(missing))
        if renew:
            self._renewals[digest] = later

    async def _missing(self, manifest: Manifest) -> list[int]:
        """Return the parts that the store does not have."""
        missing, digests = list[int](), manifest.digests
        for start in range(0, len(digests), _ASKED):
            asked = [names.part_name(digest) for digest in digests[start : start + _ASKED]]
            for number, there in enumerate(await self._caller.exists(asked), start):
                if isinstance(there, Exception):
                    raise RemoteFailed("exists", str(there))
                if not there:
                    missing.append(number)
        return missing

    async def _put(self, name: str, value: Value) -> None:
        await self._caller.put_one(name, value, ttl=self._ttl)
        self._figures.bytes.labels("out").inc(len(value))

    def _note_foreign(self, digest: bytes, found: Value, stated: bytes) -> None:
        """Count what has the name of a profile and is neither its manifest nor, as put before, itself."""
        if not found or found == stated:
            return
        try:
            try:
                Manifest.from_bytes(found)
            except BadMagic:
                require_header(found)
            else:
                raise WrongRecord("manifest of a profile", "names other parts")
        except Corrupt as error:
            self._figures.refused_profile(error)
            _log.warning("what the remote store has as profile %s is replaced: %s", digest.hex(), error)

    async def _manifest(self, digest: bytes) -> Manifest:
        """Return the manifest of a profile that is here, read in parts: others want the lane, too.

        Raises:
            UnknownProfile: it is not here, or is not what it was.
        """
        size = await self._lane.run(self._folder.size, digest)
        whole, digests = hashlib.sha256(), list[bytes]()

        def taken_in(start: int) -> bytes:
            part = self._folder.piece(digest, start, min(PART_BYTES, size - start))
            whole.update(part)
            return hashlib.sha256(part).digest()

        for number in range(count_of(size, PART_BYTES)):
            digests.append(await self._lane.run(taken_in, number * PART_BYTES))
        if whole.digest() != digest:
            raise UnknownProfile(digest)
        return Manifest(size, tuple(digests), PART_BYTES)

    def _part(self, digest: bytes, manifest: Manifest, number: int) -> bytes:
        part = self._folder.piece(digest, *manifest.bounds(number))
        if hashlib.sha256(part).digest() != manifest.digests[number]:
            raise UnknownProfile(digest)
        return part
