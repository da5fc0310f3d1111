"""How much of a prefix is here: of one rank, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvtcd.core.catalog import Catalog
from kvtcd.core.errors import UnknownNamespace
from kvtcd.core.keys import EngineKey, RecordKey, chain
from kvtcd.core.matches import BlockMatch, Matches
from kvtcd.core.popularity import Popular, Popularity
from kvtcd.engine.matching import Matcher
from kvtcd.engine.namespaces import Namespace, Registry
from kvtcd.engine.ranks import held_by_all, ranks
from kvtcd.engine.recorder import Line, Recorder
from kvtcd.engine.remote.tier import RemoteTier


class Prefixes:
    """Answers matches. All methods belong to the loop.

    Args:
        catalog: only asked.
        registry: of namespaces.
        recorder: told what was asked for, if there is one.
        remote: the remote tier, if there is one.
    """

    def __init__(
        self, catalog: Catalog, registry: Registry, recorder: Recorder | None,
        remote: RemoteTier | None = None,
    ) -> None:  # fmt: skip
        self._catalog, self._registry, self._recorder = catalog, registry, recorder
        self._remote = remote
        self._popularity: dict[int, Popularity] = {}
        """Of the namespaces in which a match ever found something."""

    async def look(
        self, namespace: Namespace, salt: bytes, *, keys: Sequence[EngineKey] = (),
        tokens: Sequence[int] = (), all_ranks: bool = False,
    ) -> None:  # fmt: skip
        """Find out what of a prefix the remote tier has, for the match that follows, in a moment at most.

        Args:
            namespace: of these blocks.
            salt: of these blocks.
            keys: of the blocks.
            tokens: of a sequence, instead.
            all_ranks: look for the blocks of every rank.

        Raises:
            BadRequest: see `match`.
        """
        if self._remote is None:
            return
        for member in self._members(namespace, all_ranks=all_ranks) or []:
            size = member.identity.block_tokens
            links = chain(member.digest, tokens[: len(tokens) // size * size], size)
            names = self._matcher(member, salt).record_keys([*keys, *(link.key for link in links)])
            await self._remote.look(member, [name for name in names if not self._catalog.places(name)])

    def match(
        self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes, *, all_ranks: bool = False
    ) -> Matches:
        """Say of each key whether it can be served, and from where; this marks nothing as used.

        Whose keys they are knows which key a partial block would have that continues his prefix; the answer
        has the lengths that are worth asking for.

        Args:
            namespace: of these blocks.
            keys: of a prefix, or any.
            salt: of these blocks.
            all_ranks: count only what every rank of this model has, in the slowest tier of them.

        Raises:
            BadRequest: `all_ranks`, and the identity does not say which rank it is.
        """
        members = self._members(namespace, all_ranks=all_ranks)
        matchers = [self._matcher(member, salt) for member in members or [namespace]]
        named = [matcher.record_keys(keys) for matcher in matchers]
        self._note(namespace, named[0])
        if members is None:
            return Matches.of(BlockMatch(key, 0, None) for key in keys)
        held = [matcher.by_keys(keys, names) for matcher, names in zip(matchers, named, strict=True)]
        found = Matches.of(held_by_all(held))
        prefix = found.prefix
        self._count(namespace, prefix, salt)
        end = prefix[-1].key if prefix else None
        lengths = set.intersection(*(matcher.lengths(end) for matcher in matchers))
        partials = sorted(n for n in lengths if n < namespace.identity.block_tokens)
        return replace(found, partials=tuple(partials))

    def match_tokens(
        self, namespace: Namespace, tokens: Sequence[int], salt: bytes, *, all_ranks: bool = False
    ) -> Matches:
        """Return the longest stored prefix of a token sequence under our own key chain; see `match`."""
        members = self._members(namespace, all_ranks=all_ranks) or []
        if self._recorder:
            links = chain(namespace.digest, tokens, namespace.identity.block_tokens)
            self._note(namespace, self._matcher(namespace, salt).record_keys([link.key for link in links]))
        found = [self._matcher(member, salt).by_tokens(tokens) for member in members]
        prefix = Matches.of(held_by_all(found)).prefix
        self._count(namespace, prefix, salt)
        return Matches.of(prefix)

    def _members(self, namespace: Namespace, *, all_ranks: bool) -> list[Namespace] | None:
        if not all_ranks:
            return [namespace]
        known = self._registry.tenants[namespace.tenant].namespaces.values()
        return ranks(namespace, filter(self._registry.admits, known))

    def record_keys(self, namespace: Namespace, keys: Sequence[EngineKey], salt: bytes) -> list[RecordKey]:
        """Return the record keys of blocks.

        Raises:
            UnknownNamespace: it is being purged.
        """
        if not self._registry.admits(namespace):
            raise UnknownNamespace(namespace.name)
        return self._matcher(namespace, salt).record_keys(keys)

    def prefix_keys(
        self, namespace: Namespace, found: Matches, salt: bytes, tokens: Sequence[int] | None, *,
        all_ranks: bool,
    ) -> list[RecordKey]:  # fmt: skip
        """Return the record keys of a prefix that was matched, with `all_ranks` those of every rank.

        `tokens` is the sequence that was matched, None if that was keys.

        Raises:
            UnknownNamespace: it is being purged.
        """
        own = [block.key for block in found.prefix]
        record_keys: list[RecordKey] = []
        for member in self._members(namespace, all_ranks=all_ranks) or []:
            keys = own
            if tokens is not None and member is not namespace:
                links = chain(member.digest, tokens[: found.prefix_tokens], member.identity.block_tokens)
                keys = [link.key for link in links]
            record_keys += self.record_keys(member, keys, salt)
        return record_keys

    def most_matched(self, namespace: Namespace, number: int) -> list[Popular]:
        """Return the prefixes that matches found most often, at most so many."""
        popularity = self._popularity.get(namespace.number)
        return popularity.most(number) if popularity else []

    def forget(self, namespace: Namespace) -> None:
        """Forget a namespace that is gone."""
        self._popularity.pop(namespace.number, None)

    def _count(self, namespace: Namespace, prefix: Sequence[BlockMatch], salt: bytes) -> None:
        if prefix:
            popularity = self._popularity.setdefault(namespace.number, Popularity())
            popularity.found(prefix[0].key, salt, len(prefix))

    def _matcher(self, namespace: Namespace, salt: bytes) -> Matcher:
        remote, names = self._remote, self._registry.record_keys(namespace, salt)
        return Matcher(
            self._catalog, namespace.digest, names, namespace.identity.block_tokens,
            partial(remote.has, namespace) if remote else None,
        )  # fmt: skip

    def _note(self, namespace: Namespace, record_keys: Sequence[RecordKey]) -> None:
        if self._recorder:
            self._recorder.note(Line("match", namespace, record_keys))
