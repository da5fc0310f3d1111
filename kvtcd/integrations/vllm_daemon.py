"""What an engine asks the daemon: which chunks are there, to load them, to store them.

Every call blocks, so only threads of our own make them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kvtcd.client import BlockHead, BlockResult, Client
from kvtcd.client.call import Salt, pauses
from kvtcd.core.errors import Busy, NotFound, StoreFailed, UnknownNamespace
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.matches import BlockMatch
from kvtcd.core.place import Tier
from kvtcd.integrations.link import Link
from kvtcd.integrations.vllm_jobs import Chunk, Row, group_of, pieces, runs

_LOG = logging.getLogger("vllm.kvtcd")  # below the logger that vLLM sets up
_KEYS_AT_ONCE = 4096
_CHUNKS_AT_ONCE = 8
"""Chunks in one call: the daemon works on several at once, and each call has the same time."""


class Daemon:
    """One daemon, and the namespaces of an engine in it.

    Args:
        client: of the daemon.
        identities: of each cache group.
        salt: parts these blocks from others of the same user.
        seconds: for each call.
        valid: returns why the identities do not hold any more, or nothing; asked before each call.
        on_lost: called when the daemon is found to be away.
        lift: seconds that `find` may take to bring what it finds up to memory, so that a load is a copy.
    """

    def __init__(
        self,
        client: Client,
        identities: Mapping[int, Identity],
        *,
        salt: Salt,
        seconds: float,
        valid: Callable[[], str],
        on_lost: Callable[[], None],
        lift: float = 0.0,
    ) -> None:
        self._identities, self._salt, self._seconds = identities, salt, seconds
        self._lift = lift
        self.link = Link(client, _LOG, identities.values(), seconds=seconds, valid=valid, on_lost=on_lost)

    def find(self, keys: Sequence[EngineKey]) -> dict[EngineKey, bool]:
        """Say of each key whether its chunk is there; empty if the daemon did not say."""
        found: dict[EngineKey, bool] = {}
        by_group: defaultdict[int, list[EngineKey]] = defaultdict(list)
        for key in keys:
            by_group[group_of(key)].append(key)
        with self.link.asking():
            for group, wanted in by_group.items():
                for start in range(0, len(wanted), _KEYS_AT_ONCE):
                    found |= self._match(group, wanted[start : start + _KEYS_AT_ONCE])
        return found

    def load(self, chunks: Sequence[Chunk], row: Row) -> list[EngineKey]:
        """Fill rows; return the keys of those that were filled in full."""
        loaded: list[EngineKey] = []
        with self.link.asking():
            for part in pieces(chunks, _CHUNKS_AT_ONCE):
                loaded += self._fetched(part, row)
        return loaded

    def _fetched(self, chunks: Sequence[Chunk], row: Row) -> list[EngineKey]:
        rows = [row(chunk.row) for chunk in chunks]
        nbytes = [view.nbytes for view in rows]
        try:
            answers = self.link.named(
                self._identities[chunks[0].group],
                lambda name: list(
                    self.link.client.get_many(
                        name, [chunk.key for chunk in chunks],
                        out=rows, salt=self._salt, deadline=self._seconds,
                    )
                ),
            )  # fmt: skip
            got = [(key, data.nbytes if data is not None else None) for key, data in answers]
            del answers  # views of the rows
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
        with self.link.asking():
            for run in runs(missing):
                rows = [row(chunk.row) for chunk in run]
                try:
                    heads = [BlockHead(c.key, c.tokens, c.first, c.parent) for c in run]
                    results = self._put(run[0].group, list(zip(heads, rows, strict=True)))
                finally:
                    for view in rows:
                        view.release()
                outcomes |= {result.key: str(result.outcome) for result in results}
        return outcomes

    def _put(self, group: int, blocks: Sequence[tuple[BlockHead, memoryview]]) -> Sequence[BlockResult]:
        def call(name: str) -> Sequence[BlockResult]:
            return self.link.client.put_many(name, iter(blocks), salt=self._salt, deadline=self._seconds)

        return self.link.named(self._identities[group], call)

    def _match(self, group: int, keys: Sequence[EngineKey]) -> dict[EngineKey, bool]:
        def call(name: str) -> tuple[str, tuple[BlockMatch, ...]]:
            return name, self.link.client.match(name, keys, salt=self._salt, deadline=self._seconds).blocks

        name, blocks = self.link.named(self._identities[group], call)
        if (
            below := [block.key for block in blocks if block.tier in (Tier.DISK, Tier.REMOTE)]
            if self._lift
            else []
        ):
            self._bring_up(name, below)
        return {block.key: block.tier is not None for block in blocks}

    def _bring_up(self, name: str, keys: Sequence[EngineKey]) -> None:
        """Wait until chunks are in memory, for a while; what takes longer goes on, and loads wait for it."""
        until, client = time.monotonic() + self._lift, self.link.client
        try:
            asked = client.prefetch(name, keys, wait=False, salt=self._salt, deadline=self._seconds)
            for pause in pauses():
                if asked.state != "running" or time.monotonic() >= until:
                    return
                time.sleep(pause)
                asked = client.operation(asked.id)
        except (Busy, NotFound, StoreFailed, UnknownNamespace):
            return  # they are there all the same, or purged meanwhile, which a load finds out
