"""How much of a sequence is here: a question to the catalog that changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import ChainBlock, EngineKey, RecordKey, chain, chain_key, chain_root, token_array
from kvtcd.core.matches import BlockMatch
from kvtcd.core.place import Tier

LOOK = 1024
"""Continuations of a block that a match looks at, the last stored first."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Matches within one namespace and salt.

    Attributes:
        catalog: only asked.
        digest: of the namespace.
        record_key: makes the record key of a key of this namespace and salt.
        block_tokens: of a full block.
        elsewhere: tells whether a full block is known to be in the remote tier.
    """

    catalog: Catalog
    digest: bytes
    record_key: Callable[[bytes], RecordKey]
    block_tokens: int
    elsewhere: Callable[[RecordKey], bool] | None = None

    def record_keys(self, keys: Sequence[EngineKey]) -> list[RecordKey]:
        """Return the record keys of keys."""
        return [self.record_key(key) for key in keys]

    def by_keys(self, keys: Sequence[EngineKey], record_keys: Sequence[RecordKey]) -> list[BlockMatch]:
        """Say of each key, and of its record key, whether it can be served, and from where."""
        found = map(self.catalog.current().fastest, record_keys)
        return [
            self._missing(key, name) if there is None else BlockMatch(key, there[0], there[1].tier)
            for key, name, there in zip(keys, record_keys, found, strict=True)
        ]

    def _missing(self, key: EngineKey, record_key: RecordKey) -> BlockMatch:
        if self.elsewhere and self.elsewhere(record_key):
            return BlockMatch(key, self.block_tokens, Tier.REMOTE)
        return BlockMatch(key, 0, None)

    def lengths(self, parent: EngineKey | None) -> set[int]:
        """Return the lengths, in tokens, of the stored continuations of a block, as far as one looks.

        Args:
            parent: the block; None: of those that begin a sequence, and are partial.
        """
        parent = chain_root(self.digest) if parent is None else parent
        children = self.catalog.residents.lineage.children(self.record_key(parent))
        return {child.tokens for child in islice(children, LOOK) if self.catalog.places(child.key)}

    def by_tokens(self, tokens: Sequence[int]) -> list[BlockMatch]:
        """Return the longest stored prefix of a token sequence under our own key chain.

        The last block may be a partial one: of the stored partial continuations of the last full block, the
        longest whose tokens agree.
        """
        found: list[BlockMatch] = []
        ids = token_array(tokens)
        parent = chain_root(self.digest)
        for block in chain(self.digest, tokens, self.block_tokens):
            match = self._whole(block)
            if match.tier is None:
                found.extend(self._partial(parent, ids[block.first : block.first + self.block_tokens]))
                break
            found.append(match)
            parent = block.key
        return found

    def _whole(self, block: ChainBlock) -> BlockMatch:
        record_key = self.record_key(block.key)
        if places := self.catalog.places(record_key):
            return BlockMatch(block.key, block.tokens, places[0].tier)
        full = block.tokens == self.block_tokens
        return self._missing(block.key, record_key) if full else BlockMatch(block.key, 0, None)

    def _partial(self, parent: EngineKey, ids: array[int]) -> Iterator[BlockMatch]:
        """Yield the longest stored continuation of `parent` that begins like `ids`, if there is one."""
        for length in sorted(self.lengths(parent), reverse=True):
            if length > len(ids):
                continue
            key = chain_key(parent, ids[:length])
            if places := self.catalog.places(self.record_key(key)):
                yield BlockMatch(key, length, places[0].tier)
                return
