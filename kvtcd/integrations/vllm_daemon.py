"""The daemon as a tier sees it: there, away for a while, or not to be used; and what is asked of it.

Every call blocks, so only the tier's own threads make them. `up` and `away` are for every thread: while it is
away nothing is asked, lookups are misses at once, and `connect` is tried from time to time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtcd.client import BlockHead, Client
from kvtcd.core.errors import (
    BadRequest,
    BlockMismatch,
    Busy,
    IdentityConflict,
    KvtcdError,
    ServerError,
    Stopping,
    StoreFailed,
    TooLarge,
    Unavailable,
)
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.namespaces import register
from kvtcd.integrations.vllm_jobs import Chunk, Row, group_of, pieces, runs

_LOG = logging.getLogger("vllm.kvtcd")  # below the logger that vLLM sets up
_KEYS_AT_ONCE = 4096
_CHUNKS_AT_ONCE = 8
"""Chunks in one call: the daemon works on several at once, and each call has the same time."""
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before each further try to reach a daemon that is away; the last one again and again."""
REFUSED_S = 60.0
"""The same where the daemon refuses what we are: only an operator changes that."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the daemon at one time.

    Attributes:
        names: namespace of each cache group while the daemon is there.
        boot: boot id of the daemon that was there last.
        tries: how often it was not there since.
        again: time from which it is worth a try.
        stopped: why it is never asked again, if so.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    boot: str = ""
    tries: int = 0
    again: float = 0.0
    stopped: str = ""

    @property
    def up(self) -> bool:
        """Whether the daemon is there, as far as is known."""
        return bool(self.names) and not self.stopped

    @property
    def away(self) -> bool:
        """Whether it was looked for and is not there; not so before the first try has ended."""
        return self.tries > 0 or bool(self.stopped)

    def found(self, names: Mapping[int, str], boot: str) -> Link:
        """Return the link to a daemon that answered."""
        return Link(names, boot, stopped=self.stopped)

    def lost(self, now: float, *, refused: bool) -> Link:
        """Return the link after a call that failed."""
        pause = REFUSED_S if refused else PAUSES_S[min(self.tries, len(PAUSES_S) - 1)]
        return Link({}, self.boot, self.tries + 1, now + pause, self.stopped)

    def pause(self, now: float) -> float | None:
        """Return seconds until the next try; None where there is nothing to try."""
        return None if self.up or self.stopped else max(0.0, self.again - now)


class Daemon:
    """One daemon, and the namespaces of an engine in it.

    Args:
        client: of the daemon.
        identities: of each cache group.
        salt: parts these blocks from others of the same user.
        seconds: for each call.
        valid: returns why the identities do not hold any more, or nothing; asked before each call.
        on_lost: called when the daemon is found to be away.
    """

    def __init__(
        self,
        client: Client,
        identities: Mapping[int, Identity],
        *,
        salt: bytes,
        seconds: float,
        valid: Callable[[], str],
        on_lost: Callable[[], None],
    ) -> None:
        self._client, self._identities = client, identities
        self._salt, self._seconds = salt, seconds
        self._valid, self._on_lost = valid, on_lost
        self._link = Link()
        self._lock = threading.Lock()

    @property
    def up(self) -> bool:
        """Whether it can be used now."""
        return self._link.up

    @property
    def away(self) -> bool:
        """Whether there is no use in waiting for it."""
        return self._link.away

    def pause(self) -> float | None:
        """Return seconds until `connect` is worth a try; None where it is not."""
        return self._link.pause(time.monotonic())

    def connect(self) -> bool:
        """Try to reach the daemon and register; tell whether another one than last time answered."""
        if self._stop_if_invalid():
            return False
        try:
            boot = self._client.info().boot_id
            names = {
                number: register(self._client, identity, deadline=self._seconds)
                for number, identity in self._identities.items()
            }
        except KvtcdError as error:
            self._lost(error)
            return False
        with self._lock:
            before, self._link = self._link, self._link.found(names, boot)
        if before.boot != boot or before.tries:
            _LOG.info(
                "kvtcd: stores and loads through %s as %s", self._client.address, ", ".join(names.values())
            )
        return bool(before.boot) and before.boot != boot

    def find(self, keys: Sequence[EngineKey]) -> dict[EngineKey, bool]:
        """Say of each key whether its chunk is there; empty if the daemon did not say."""
        found: dict[EngineKey, bool] = {}
        by_group: defaultdict[int, list[EngineKey]] = defaultdict(list)
        for key in keys:
            by_group[group_of(key)].append(key)
        with self._asking():
            for group, wanted in by_group.items():
                for start in range(0, len(wanted), _KEYS_AT_ONCE):
                    found |= self._match(self._name(group), wanted[start : start + _KEYS_AT_ONCE])
        return found

    def load(self, chunks: Sequence[Chunk], row: Row) -> list[EngineKey]:
        """Fill rows; return the keys of those that were filled in full."""
        loaded: list[EngineKey] = []
        with self._asking():
            for part in pieces(chunks, _CHUNKS_AT_ONCE):
                loaded += self._fetched(part, row)
        return loaded

    def _fetched(self, chunks: Sequence[Chunk], row: Row) -> list[EngineKey]:
        rows = [row(chunk.row) for chunk in chunks]
        nbytes = [view.nbytes for view in rows]
        try:
            answers = self._client.get_many(
                self._name(chunks[0].group),
                [chunk.key for chunk in chunks],
                out=rows, salt=self._salt, deadline=self._seconds,
            )  # fmt: skip
            got = [(key, data.nbytes if data is not None else None) for key, data in answers]
        finally:
            for view in rows:
                view.release()
        return [key for (key, found), wanted in zip(got, nbytes, strict=True) if found == wanted]

    def store(self, chunks: Sequence[Chunk], row: Row) -> dict[EngineKey, str]:
        """Store rows that the daemon does not have; say of each key what became of it."""
        outcomes: dict[EngineKey, str] = {}
        known = self.find([chunk.key for chunk in chunks])
        outcomes |= {key: "duplicate" for key, is_there in known.items() if is_there}
        missing = [chunk for chunk in chunks if known.get(chunk.key) is False]
        with self._asking():
            for run in runs(missing):
                rows = [row(chunk.row) for chunk in run]
                try:
                    heads = [BlockHead(c.key, c.tokens, c.first, c.parent) for c in run]
                    results = self._client.put_many(
                        self._name(run[0].group),
                        zip(heads, rows, strict=True),
                        salt=self._salt,
                        deadline=self._seconds,
                    )
                finally:
                    for view in rows:
                        view.release()
                outcomes |= {result.key: str(result.outcome) for result in results}
        return outcomes

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _match(self, name: str, keys: Sequence[EngineKey]) -> dict[EngineKey, bool]:
        blocks = self._client.match(name, keys, salt=self._salt, deadline=self._seconds).blocks
        return {block.key: block.tier is not None for block in blocks}

    def _name(self, group: int) -> str:
        if self._stop_if_invalid() or not (name := self._link.names.get(group)):
            raise Unavailable("the daemon is away")
        return name

    def _stop_if_invalid(self) -> bool:
        if not self._link.stopped and (why := self._valid()):
            _LOG.error("kvtcd: %s; nothing is stored or loaded until the engine is started again", why)
            with self._lock:
                self._link = Link(stopped=why)
        return bool(self._link.stopped)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """End what the daemon did not do as a miss; note when it is away."""
        try:
            yield
        except KvtcdError as error:
            overloaded = isinstance(error, Busy | StoreFailed | ServerError) and not isinstance(
                error, Stopping
            )
            if self.up and not overloaded:
                self._lost(error)

    def _lost(self, error: KvtcdError) -> None:
        refused = isinstance(error, BadRequest | IdentityConflict | BlockMismatch | TooLarge)
        with self._lock:
            before, self._link = self._link, self._link.lost(time.monotonic(), refused=refused)
        if before.up or not before.tries:
            _LOG.warning("kvtcd: all chunks are misses until the daemon can be used again: %s", error)
        self._on_lost()
