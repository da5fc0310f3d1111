"""Pages of one host pool in the daemon: looked up, fetched, stored.

Every call blocks, but for no longer than its time, and none raises what the daemon does or does not do.
SGLang calls from a thread for prefetches and one for backups; each has memory of its own, which the daemon
shares where it can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from kvtcd.client import BlockHead, BlockResult, Client
from kvtcd.client.call import Salt
from kvtcd.client.regions import Region
from kvtcd.core.errors import KvtcdError
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.link import Link

_BLOCKS_AT_ONCE = 16
"""Blocks in one call, as far as they fit in `_STAGED_BYTES`: the daemon works on several at once."""
_STAGED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its key, and where it lies in its sequence as far as that is known."""

    key: EngineKey
    first: int | None = None
    parent: EngineKey | None = None


class Staging:
    """Memory for some blocks, made when it is first needed and anew after a call that failed.

    Args:
        client: of the daemon, which may share the memory.
        nbytes: of a block.
    """

    def __init__(self, client: Client, nbytes: int) -> None:
        self._client, self._nbytes = client, nbytes
        self.blocks = max(1, min(_BLOCKS_AT_ONCE, _STAGED_BYTES // nbytes))
        self._region: Region | None = None
        self.lock = threading.Lock()

    def parts(self, count: int) -> list[memoryview]:
        """Return memory for so many blocks."""
        if self._region is None:
            self._region = self._client.region(self.blocks * self._nbytes)
        memory = self._region.memory
        return [memory[i * self._nbytes : (i + 1) * self._nbytes] for i in range(count)]

    def drop(self) -> None:
        """Leave the memory alone: a daemon that did not answer may still write to it."""
        if self._region is not None:
            self._region.close()
            self._region = None


class Store:
    """The blocks of one identity.

    Args:
        link: to the daemon.
        identity: of the blocks.
        salt: parts them from others of the same user.
        seconds: for each call of SGLang.
    """

    def __init__(self, link: Link, identity: Identity, *, salt: Salt, seconds: float) -> None:
        self._link, self.identity = link, identity
        self._salt, self._seconds = salt, seconds
        nbytes = identity.layout.nbytes(identity.block_tokens)
        self._reading, self._writing = Staging(link.client, nbytes), Staging(link.client, nbytes)

    def present(self, keys: Sequence[EngineKey]) -> list[bool]:
        """Say of each page whether it is there."""
        found: dict[EngineKey, bool] = {}
        self._link.reach()
        with self._link.asking():
            found = self._matched(keys, time.monotonic() + self._seconds)
        return [found.get(key, False) for key in keys]

    def prefix(self, keys: Sequence[EngineKey]) -> int:
        """Return how many leading pages are there."""
        return sum(takewhile(bool, self.present(keys)))

    def fetch(self, keys: Sequence[EngineKey], take: Callable[[int, Tensor], None]) -> list[bool]:
        """Fetch pages; return of each whether `take` got its block, which it may not keep.

        Args:
            keys: of the pages.
            take: called with the number of a key and its block.
        """
        done = [False] * len(keys)
        until, staging = time.monotonic() + self._seconds, self._reading
        self._link.reach()
        with staging.lock, self._link.asking():
            for start in range(0, len(keys), staging.blocks):
                if time.monotonic() > until:
                    break
                part = keys[start : start + staging.blocks]
                for i, block in self._fetched(part, staging, until):
                    take(start + i, block)
                    done[start + i] = True
        return done

    def put(self, pages: Sequence[Page], give: Callable[[int, Tensor], None]) -> list[bool]:
        """Store those pages that are not there; return of each whether it is now.

        Args:
            pages: in the order of their sequence.
            give: called with the number of a page; writes its block.
        """
        done = [False] * len(pages)
        until, staging = time.monotonic() + self._seconds, self._writing
        self._link.reach()
        with staging.lock, self._link.asking():
            known = self._matched([page.key for page in pages], until)
            missing = [i for i, page in enumerate(pages) if not known[page.key]]
            done = [known[page.key] for page in pages]
            for start in range(0, len(missing), staging.blocks):
                if time.monotonic() > until:
                    break
                numbers = missing[start : start + staging.blocks]
                kept = self._stored([pages[i] for i in numbers], numbers, give, until)
                for i in numbers:
                    done[i] = pages[i].key in kept
        return done

    def purge(self) -> None:
        """Remove all blocks of this identity."""
        client = self._link.client
        self._link.reach()
        with self._link.asking():
            self._link.named(self.identity, lambda name: client.purge(name, deadline=self._seconds))
            self._link.connect()  # forgets its name, so that it is registered again

    def _matched(self, keys: Sequence[EngineKey], until: float) -> dict[EngineKey, bool]:
        client = self._link.client
        blocks = self._link.named(
            self.identity,
            lambda name: client.match(name, keys, salt=self._salt, deadline=_left(until)).blocks,
        )
        return {block.key: block.tier is not None for block in blocks}

    def _fetched(self, keys: Sequence[EngineKey], staging: Staging, until: float) -> list[tuple[int, Tensor]]:
        parts, client = staging.parts(len(keys)), self._link.client

        def call(name: str) -> list[tuple[EngineKey, memoryview | None]]:
            return list(client.get_many(name, keys, out=parts, salt=self._salt, deadline=_left(until)))

        try:
            answers = self._link.named(self.identity, call)
        except KvtcdError:
            staging.drop()
            raise
        return [
            (i, torch.frombuffer(data, dtype=torch.uint8))
            for i, ((_, data), part) in enumerate(zip(answers, parts, strict=True))
            if data is not None and data.nbytes == part.nbytes
        ]

    def _stored(
        self, pages: Sequence[Page], numbers: Sequence[int], give: Callable[[int, Tensor], None], until: float
    ) -> set[EngineKey]:
        tokens, parts = self.identity.block_tokens, self._writing.parts(len(pages))
        for number, part in zip(numbers, parts, strict=True):
            give(number, torch.frombuffer(part, dtype=torch.uint8))
        heads = [BlockHead(page.key, tokens, page.first, page.parent) for page in pages]
        client = self._link.client

        def call(name: str) -> Sequence[BlockResult]:
            blocks = zip(heads, parts, strict=True)
            return client.put_many(name, blocks, salt=self._salt, deadline=_left(until))

        try:
            results = self._link.named(self.identity, call)
        except KvtcdError:
            self._writing.drop()
            raise
        return {result.key for result in results if result.outcome != "dropped"}


def _left(until: float) -> float:
    """Return the seconds that are left, a moment at least."""
    return max(0.01, until - time.monotonic())
