"""The host pools of one SGLang rank, by their names: keys as SGLang has them, pages by where they begin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvtcd.core.errors import KvtcdError
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.link import Link
from kvtcd.integrations.sglang_identity import Model, Parameters, Ranks, engine_key, identity_of
from kvtcd.integrations.sglang_pages import Pages, pages_of
from kvtcd.integrations.sglang_store import Page, Store

KV = "kv"
Copy = Callable[[int, Tensor], None]
"""Copies the page of a key, by its number, out of a block or into one."""


@dataclass(frozen=True, slots=True)
class _Pool:
    pool: Any
    pages: Pages
    store: Store
    tokens: int

    def begins(self, host_indices: Tensor | None, count: int) -> list[int]:
        """Return where in the pool each page begins; none if SGLang gives not as many as it has keys."""
        if host_indices is None or host_indices.numel() != count * self.tokens:
            return []
        return [int(index) for index in host_indices[:: self.tokens].tolist()]


class Pools:
    """Pages of pools in the daemon; what is not there, or not known, is a miss.

    Args:
        link: to the daemon.
        given: by the operator.
        ranks: of this process.
        model: whose pages these are.
        writes: whether this rank stores what all ranks of its group have.
        version: of SGLang.
        log: where to say what happens.
    """

    def __init__(
        self,
        link: Link,
        given: Parameters,
        ranks: Ranks,
        model: Model,
        *,
        writes: bool,
        version: str,
        log: logging.Logger,
    ) -> None:
        self._link, self._given, self._ranks, self._model = link, given, ranks, model
        self._writes, self._version, self._log = writes, version, log
        self._pools: dict[str, _Pool] = {}

    def register(self, name: str, pool: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take a pool; one that cannot be kept is left alone."""
        given = self._given
        try:
            pages = pages_of(pool, name, version=self._version)
            identity = identity_of(name, pages.kind, self._ranks, self._model, variant=given.variant)
        except KvtcdError as error:
            self._log.error("kvtcd: pages of pool %s are neither stored nor loaded: %s", name, error)
            return
        seconds = float(given.timeout_seconds)
        store = Store(self._link, identity, salt=given.salt, seconds=seconds)
        tokens = getattr(pool, "logical_page_size", pages.kind.tokens)
        self._pools[name] = _Pool(pool, pages, store, int(tokens))

    def present(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Say of each page whether it is there."""
        ours, wanted = self._pools.get(name), _whole(keys)
        return _filled(ours.store.present(wanted) if ours else [], keys)

    def prefix(self, name: str, keys: Sequence[str]) -> int:
        """Return how many leading pages are there."""
        ours = self._pools.get(name)
        return ours.store.prefix(_whole(keys)) if ours else 0

    def fetch(self, name: str, keys: Sequence[str], host_indices: Tensor | None) -> list[bool]:
        """Fetch pages into a pool; say of each whether it is there now."""
        ours = self._pools.get(name)
        if ours is None or not (at := ours.begins(host_indices, len(keys))):
            return _filled([], keys)
        return self._get(ours, keys, lambda i, block: ours.pages.scatter(block, at[i]))

    def put(
        self, name: str, keys: Sequence[str], host_indices: Tensor | None, before: Sequence[str] | None
    ) -> list[bool]:
        """Store pages of a pool, which are a sequence; say of each whether the daemon has it.

        Args:
            name: of the pool.
            keys: of the pages.
            host_indices: their tokens in the pool.
            before: keys of all pages before them, None if nobody says.
        """
        ours = self._pools.get(name)
        if ours is None or not (at := ours.begins(host_indices, len(keys))):
            return _filled([], keys)
        return self._set(ours, keys, before, lambda i, block: ours.pages.gather(at[i], block))

    def fetch_flat(self, keys: Sequence[str], flat: Sequence[Tensor] | None) -> list[Tensor | None]:
        """Return pages of keys and values as SGLang takes them out of the pool, in `flat` if given."""
        if (ours := self._pools.get(KV)) is None:
            return [None] * len(keys)
        pages = [ours.pool.get_dummy_flat_data_page() for _ in keys] if flat is None else flat
        got = self._get(ours, keys, lambda i, block: ours.pages.unpack(block, pages[i]))
        return [page if done else None for page, done in zip(pages, got, strict=True)]

    def put_flat(self, keys: Sequence[str], flat: Sequence[Tensor]) -> list[bool]:
        """Store pages of keys and values as SGLang takes them out of the pool."""
        if (ours := self._pools.get(KV)) is None:
            return _filled([], keys)
        return self._set(ours, keys, None, lambda i, block: ours.pages.pack(flat[i], block))

    def clear(self) -> None:
        """Remove all pages of this model and rank."""
        for ours in self._pools.values():
            ours.store.purge()

    def _get(self, ours: _Pool, keys: Sequence[str], take: Copy) -> list[bool]:
        return _filled(ours.store.fetch(_whole(keys), take), keys)

    def _set(self, ours: _Pool, keys: Sequence[str], before: Sequence[str] | None, give: Copy) -> list[bool]:
        wanted, tokens = _whole(keys), ours.store.identity.block_tokens
        if not self._writes and ours.store.identity.parallel == self._ranks.parallel(replicated=True):
            return [True] * len(keys)  # another rank has the same pages, and stores them
        parents = [engine_key(before[-1]) if before else None, *wanted]
        firsts = [None if before is None else (len(before) + i) * tokens for i in range(len(wanted))]
        pages = [Page(*three) for three in zip(wanted, firsts, parents, strict=False)]
        return _filled(ours.store.put(pages, give), keys)


def _whole(keys: Sequence[str]) -> list[EngineKey]:
    """Return leading keys as they are known to the daemon, up to the first that is no whole hash."""
    known: list[EngineKey] = []
    for key in keys:
        if (ours := engine_key(key)) is None:
            break
        known.append(ours)
    return known


def _filled(answers: Sequence[bool], keys: Sequence[str]) -> list[bool]:
    """Return an answer for each key: no, where there is none."""
    return [*answers, *[False] * (len(keys) - len(answers))]
