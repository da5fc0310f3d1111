"""How much of a sequence is here: a question to the catalog that changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import EngineKey, RecordKey, chain, chain_key, chain_root, token_array
from kvtcd.core.matches import BlockMatch

LOOK = 1024
"""Continuations of a block that a match looks at, the last stored first."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Matches within one namespace and salt.

    Attributes:
        catalog: only asked.
        digest: of the namespace.
        record_key: makes the record key of a key of this namespace and salt.
    """

    catalog: Catalog
    digest: bytes
    record_key: Callable[[bytes], RecordKey]

    def by_keys(self, keys: Sequence[EngineKey]) -> list[BlockMatch]:
        """Say of each key whether it can be served, and from where."""
        residents, found = self.catalog.current(), []
        for key in keys:
            record_key = self.record_key(key)
            places = residents.places(record_key)
            if places:
                found.append(BlockMatch(key, residents.entries[record_key].tokens, places[0].tier))
            else:
                found.append(BlockMatch(key, 0, None))
        return found

    def lengths(self, parent: EngineKey | None) -> set[int]:
        """Return the lengths, in tokens, of the stored continuations of a block, as far as one looks.

        Args:
            parent: the block; None: of those that begin a sequence, and are partial.
        """
        parent = chain_root(self.digest) if parent is None else parent
        children = self.catalog.residents.lineage.children(self.record_key(parent))
        return {child.tokens for child in islice(children, LOOK) if self.catalog.places(child.key)}

    def by_tokens(self, tokens: Sequence[int], block_tokens: int) -> list[BlockMatch]:
        """Return the longest stored prefix of a token sequence under our own key chain.

        The last block may be a partial one: of the stored partial continuations of the last full block, the
        longest whose tokens agree.
        """
        found: list[BlockMatch] = []
        ids = token_array(tokens)
        parent = chain_root(self.digest)
        for block in chain(self.digest, tokens, block_tokens):
            places = self.catalog.places(self.record_key(block.key))
            if not places:
                found.extend(self._partial(parent, ids[block.first : block.first + block_tokens]))
                break
            found.append(BlockMatch(block.key, block.tokens, places[0].tier))
            parent = block.key
        return found

    def _partial(self, parent: EngineKey, ids: array[int]) -> Iterator[BlockMatch]:
        """Yield the longest stored continuation of `parent` that begins like `ids`, if there is one."""
        for length in sorted(self.lengths(parent), reverse=True):
            if length > len(ids):
                continue
            key = chain_key(parent, ids[:length])
            if places := self.catalog.places(self.record_key(key)):
                yield BlockMatch(key, length, places[0].tier)
                return
