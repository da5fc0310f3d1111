"""How much of a sequence is here: a question to the catalog that changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import EngineKey, RecordKey, TenantKeys, chain, chain_key, chain_root, token_array
from kvtcd.core.matches import BlockMatch, Matches

LOOK = 1024
"""Continuations of a block that a match looks at, the last stored first."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Matches within one namespace and salt; `digest` is the namespace's."""

    catalog: Catalog
    keys: TenantKeys
    digest: bytes
    salt: bytes

    def by_keys(self, keys: Sequence[EngineKey], block_tokens: int) -> Matches:
        """Say of each key whether it can be served, and from where, and which partial blocks go on.

        Whose keys they are knows which key a partial block would have that continues his prefix; the daemon
        knows the lengths that are worth asking for.
        """
        found: list[BlockMatch] = []
        for key in keys:
            record_key = self._record_key(key)
            tiers = self.catalog.tiers(record_key)
            tokens = self.catalog.residents.entries[record_key].tokens if tiers else 0
            found.append(BlockMatch(key, tokens, tiers[0] if tiers else None))
        prefix = Matches(tuple(found)).prefix
        parent = prefix[-1].key if prefix else chain_root(self.digest)
        lengths = (n for n in self._lengths(parent) if n < block_tokens)
        return Matches(tuple(found), tuple(sorted(lengths)))

    def _lengths(self, parent: EngineKey) -> set[int]:
        """Return the lengths, in tokens, of the stored continuations of a block, as far as one looks."""
        children = self.catalog.residents.lineage.children(self._record_key(parent))
        return {child.tokens for child in islice(children, LOOK) if self.catalog.tiers(child.key)}

    def by_tokens(self, tokens: Sequence[int], block_tokens: int) -> Matches:
        """Return the longest stored prefix of a token sequence under our own key chain.

        The last block may be a partial one: of the stored partial continuations of the last full block, the
        longest whose tokens agree.
        """
        found: list[BlockMatch] = []
        ids = token_array(tokens)
        parent = chain_root(self.digest)
        for block in chain(self.digest, tokens, block_tokens):
            tiers = self.catalog.tiers(self._record_key(block.key))
            if not tiers:
                found.extend(self._partial(parent, ids[block.first : block.first + block_tokens]))
                break
            found.append(BlockMatch(block.key, block.tokens, tiers[0]))
            parent = block.key
        return Matches(tuple(found))

    def _partial(self, parent: EngineKey, ids: array[int]) -> Iterator[BlockMatch]:
        """Yield the longest stored continuation of `parent` that begins like `ids`, if there is one."""
        for length in sorted(self._lengths(parent), reverse=True):
            if length > len(ids):
                continue
            key = chain_key(parent, ids[:length])
            if tiers := self.catalog.tiers(self._record_key(key)):
                yield BlockMatch(key, length, tiers[0])
                return

    def _record_key(self, key: EngineKey) -> RecordKey:
        return self.keys.record_key(self.digest, self.salt, key)
