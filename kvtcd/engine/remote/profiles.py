"""Profiles come from a store: content-addressed, in parts, behind the backs of those who read blocks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtcd.core.errors import BadChecksum, BadField, BadMagic, Corrupt, RemoteFailed
from kvtcd.core.remote import names
from kvtcd.core.remote.breaker import pause
from kvtcd.core.remote.manifest import MOST_MANIFEST, PART_BYTES, Manifest, require_header
from kvtcd.engine.errands import Errands
from kvtcd.engine.lanes import Lane
from kvtcd.engine.ports import Value
from kvtcd.engine.remote import figures as fig
from kvtcd.engine.remote.caller import Caller
from kvtcd.engine.remote.figures import Figures
from kvtcd.engine.remote.folder import Draft, Folder

WAIT_S = 1.0
"""Seconds from its beginning that blocks wait for a profile; one that takes longer is for later readers."""
GIVE_UP_S = 300.0
"""Seconds without a part after which a store is not asked any more until another block names the profile."""
AGAIN_S = 10.0
"""Seconds for which a profile that was not to be had is not asked for again."""
_FIRST_S, _LONGEST_S = 0.5, 30.0
"""Pauses after a failure."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Coming:
    """A profile of which some parts are here. What touches the draft runs on the lane.

    Attributes:
        manifest: that they follow; None: they are pieces of what a release before this one has stored.
        here: their numbers.
    """

    manifest: Manifest | None
    here: set[int] = field(default_factory=set)
    draft: Draft | None = None

    def begin(self, folder: Folder, digest: bytes) -> None:
        """Have something to write to."""
        self.draft = folder.draft(digest)

    def lay(self, start: int, value: Value, digest: bytes | None) -> None:
        """Write a part, if it is what its name says.

        Raises:
            BadChecksum: it is not.
        """
        assert self.draft is not None, "it was begun"
        if digest and hashlib.sha256(value).digest() != digest:
            raise BadChecksum("part of a profile", f"{len(value)} bytes that are not {digest.hex()}")
        self.draft.write(start, value)

    def finish(self) -> None:
        """Let it be a profile, if it is one."""
        assert self.draft is not None, "it was begun"
        self.draft.finish()

    def discard(self) -> None:
        """Remove what was written."""
        if self.draft:
            self.draft.discard()


@dataclass(slots=True)
class _Fetching:
    """A profile that is asked for: the task, and until when blocks wait for it."""

    task: asyncio.Task[str]
    until: float


class Profiles:
    """Fetches the profiles that blobs name. All methods belong to the loop.

    Args:
        caller: of the store.
        folder: the profiles that are here.
        lane: on which they are written.
        figures: told of each.
        errands: by which what is refused is removed.
        most: bytes of a profile that is fetched.
        luck: see `pause`.

    Attributes:
        arrived: told that one came here.
    """

    def __init__(
        self, caller: Caller, folder: Folder, lane: Lane, figures: Figures, errands: Errands, *, most: int,
        luck: Callable[[], float],
    ) -> None:  # fmt: skip
        self._caller, self._folder, self._lane, self._figures = caller, folder, lane, figures
        self._errands, self._most, self._luck = errands, most, luck
        self.arrived: Callable[[], object] = _nobody
        self._lately: dict[bytes, tuple[float, str]] = {}
        """Until when what came of asking for a profile is taken to be so."""
        self._fetching: dict[bytes, _Fetching] = {}
        self._coming: dict[bytes, _Coming] = {}

    @property
    def left(self) -> int:
        """Parts that are still to come, as far as that is known."""
        known = [(one.manifest, one.here) for one in self._coming.values() if one.manifest]
        return sum(len(manifest.digests) - len(here) for manifest, here in known)

    @property
    def running(self) -> list[asyncio.Task[str]]:
        """What is under way."""
        return [one.task for one in self._fetching.values()]

    async def close(self) -> None:
        """Remove what is not whole; nothing is under way any more."""
        for coming in self._coming.values():
            await self._lane.run(coming.discard)
        self._coming.clear()

    async def fetch(self, digest: bytes) -> bool:
        """Bring a profile here, for which a block waits a little; tell whether it is here, or nowhere.

        Raises:
            RemoteFailed: it is on its way, or the store cannot be asked.
        """
        now = asyncio.get_running_loop().time()
        until, outcome = self._lately.get(digest, (0.0, fig.MISS))
        if now >= until:
            if digest not in self._fetching:
                task = asyncio.create_task(self._fetch(digest), name="kvtcd-profile")
                self._fetching[digest] = _Fetching(task, now + WAIT_S)
                task.add_done_callback(lambda _: self._fetching.pop(digest))
            fetching = self._fetching[digest]
            done, _ = await asyncio.wait([fetching.task], timeout=max(0.0, fetching.until - now))
            if not done or fetching.task.cancelled():
                raise RemoteFailed("profile", f"{digest.hex()} is on its way here")
            outcome = fetching.task.result()
        if outcome == fig.FAILED:
            raise RemoteFailed("profile", f"{digest.hex()} could not be fetched")
        return outcome == fig.HIT

    async def _fetch(self, digest: bytes) -> str:
        outcome = fig.FAILED
        try:
            outcome = await self._patiently(digest)
        except RemoteFailed as error:
            _log.warning("profile %s cannot be fetched: %s", digest.hex(), error)
        except OSError as error:
            _log.warning("profile %s cannot be kept: %s", digest.hex(), error)
            await self._begun_anew(digest)
        if outcome == fig.HIT:
            _log.info("profile %s was fetched from the remote store", digest.hex())
            self.arrived()
        else:
            self._lately[digest] = asyncio.get_running_loop().time() + AGAIN_S, outcome
        if outcome != fig.REFUSED:  # which was counted with its cause
            self._figures.profiles.labels(outcome).inc()
        return outcome

    async def _patiently(self, digest: bytes) -> str:
        """Ask until all is here, through outages as long as parts come in between."""
        loop, attempt, here = asyncio.get_running_loop(), 0, -1
        last = loop.time()
        while True:
            try:
                return await self._parts(digest)
            except RemoteFailed:
                so_far = len(coming.here) if (coming := self._coming.get(digest)) else 0
                if so_far > here:
                    attempt, here, last = 0, so_far, loop.time()
                elif loop.time() - last > GIVE_UP_S:
                    raise
                attempt += 1
                wait = pause(attempt, _FIRST_S, _LONGEST_S, self._luck)
            await asyncio.sleep(max(wait, self._caller.breaker.wait))

    async def _parts(self, digest: bytes) -> str:
        """Fetch what is not here yet; return what became of it."""
        name = blamed = names.profile_name(digest)
        try:
            head = await self._caller.piece(name, 0, MOST_MANIFEST)
            if not head:
                return fig.MISS
            try:
                manifest = Manifest.from_bytes(head)
            except BadMagic:
                require_header(head)  # else it is none of a release before this one either
                return await self._pieces(digest, name)
            if manifest.size > self._most:
                raise BadField("profile", f"{manifest.size} bytes; remote.profile allows {self._most}")
            coming = await self._begun(digest, manifest)
            for number, part in enumerate(manifest.digests):
                if number in coming.here:
                    continue
                start, nbytes = manifest.bounds(number)
                blamed = names.part_name(part)
                value = await self._caller.value(blamed, nbytes)
                if value is None:
                    return fig.MISS
                await self._lane.run(coming.lay, start, value, part)
                self._figures.bytes.labels("in").inc(len(value))
                coming.here.add(number)
            blamed = name
            return await self._finished(digest, coming)
        except Corrupt as error:
            if blamed == name:
                await self._begun_anew(digest)
            self._refuse(digest, blamed, error)
            return fig.REFUSED

    async def _pieces(self, digest: bytes, name: str) -> str:
        """Fetch a profile that lies under its name in one: a release before this one has put it there."""
        coming, number, last = await self._begun(digest, None), 0, PART_BYTES
        while last == PART_BYTES:
            if number not in coming.here:
                value = await self._caller.piece(name, number * PART_BYTES, PART_BYTES)
                if number * PART_BYTES + len(value) > self._most:
                    raise BadField("profile", f"more than the {self._most} bytes that remote.profile allows")
                await self._lane.run(coming.lay, number * PART_BYTES, value, None)
                self._figures.bytes.labels("in").inc(last := len(value))
                if last == PART_BYTES:
                    coming.here.add(number)
            number += 1
        return await self._finished(digest, coming)

    async def _begun(self, digest: bytes, manifest: Manifest | None) -> _Coming:
        """Return what is here of a profile, nothing if another manifest says what it is."""
        coming = self._coming.get(digest)
        if coming is None or coming.manifest != manifest:
            await self._begun_anew(digest)
            coming = self._coming[digest] = _Coming(manifest)
            await self._lane.run(coming.begin, self._folder, digest)
        return coming

    async def _begun_anew(self, digest: bytes) -> None:
        if coming := self._coming.pop(digest, None):
            await self._lane.run(coming.discard)

    async def _finished(self, digest: bytes, coming: _Coming) -> str:
        del self._coming[digest]
        await self._lane.run(coming.finish)
        return fig.HIT

    def _refuse(self, digest: bytes, name: str, error: Corrupt) -> None:
        """Count what is no profile, and remove it: whoever has the true one puts it there again."""
        self._figures.refused_profile(error)
        _log.warning("profile %s in the remote store is refused: %s", digest.hex(), error)
        _ = self._errands.start("refusal", self._caller.delete([name]), expected=(RemoteFailed,))


def _nobody() -> None:
    """Tell nobody."""
