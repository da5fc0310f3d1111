"""What LMCache's objects are to the daemon: looked up and locked, loaded, stored, deleted.

Every call blocks, so only lanes make them; none raises what the daemon does or does not do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvtcd.client import BlockHead, BlockResult, Client
from kvtcd.core.errors import KvtcdError
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.integrations.link import Link
from kvtcd.integrations.lmcache_chains import Chains
from kvtcd.integrations.lmcache_identity import Facts, Place, Shape, identity_of
from kvtcd.integrations.lmcache_locks import Locks

_KEYS_AT_ONCE = 4096
_OBJECTS_AT_ONCE = 8
"""Objects in one call: the daemon works on several at once, and each call has the same time."""
LEASE_S = 60.0
"""How long what was found stays at most; a load follows its lookup at once."""


@dataclass(frozen=True, slots=True)
class Name:
    """LMCache's key of an object, in our terms; `salt` is complete."""

    key: EngineKey
    place: Place
    salt: bytes


@dataclass(frozen=True, slots=True)
class Object:
    """An object that is to be stored, or filled; `memory` has its bytes, or room for them."""

    name: Name
    shape: Shape
    memory: memoryview


Group = tuple[Identity, bytes]
"""Namespace and salt: what the objects of one call have in common."""


class Daemon:
    """One daemon, and the objects of an LMCache server in it.

    Args:
        client: of the daemon.
        facts: returns what is known of a model by its name, None for one that is not to be stored.
        version: of LMCache and of the engine.
        lookup_seconds: how long the daemon may take for a lookup.
        seconds: the same for each load or store.
        log: where to say what happens.
    """

    def __init__(
        self,
        client: Client,
        facts: Callable[[str], Facts | None],
        *,
        version: str,
        lookup_seconds: float,
        seconds: float,
        log: logging.Logger,
    ) -> None:
        self.link = Link(client, log, seconds=lookup_seconds)
        self._facts, self._version, self._log = facts, version, log
        self._lookup_seconds, self._seconds = lookup_seconds, seconds
        self._shapes: dict[Place, Shape] = {}
        self._chains, self._locks = Chains(), Locks()
        self._count_lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def find(self, names: Sequence[Name], shapes: Mapping[int, Shape]) -> list[bool]:
        """Say of each object whether it is there, and keep those that are for a while.

        Args:
            names: of objects; those of one place and salt are a sequence from its first chunk on.
            shapes: of the objects of each group, as far as LMCache says.
        """
        there: set[Name] = set()
        with self._asking():
            for group, members in self._grouped(names, lambda name: shapes.get(name.place.group)):
                self._chains.seen(group, [name.key for name in members])
                for start in range(0, len(members), _KEYS_AT_ONCE):
                    there |= self._matched(group, members[start : start + _KEYS_AT_ONCE])
        found = [name in there for name in names]
        self._count(hit=sum(found), miss=len(found) - sum(found))
        return found

    def release(self, names: Sequence[Name]) -> None:
        """Give back what `find` kept."""
        over = self._locks.released(names, time.monotonic())
        with self._asking():
            for lease in over:
                self.link.client.give_back(lease)

    def load(self, objects: Sequence[Object]) -> list[bool]:
        """Fill objects; say of each whether it was filled in full."""
        loaded: set[Name] = set()
        with self._asking():
            for group, members in self._objects(objects):
                for start in range(0, len(members), _OBJECTS_AT_ONCE):
                    loaded |= self._fetched(group, members[start : start + _OBJECTS_AT_ONCE])
        filled = [one.name in loaded for one in objects]
        self._count(loaded=sum(filled), lost=len(filled) - sum(filled))
        return filled

    def store(self, objects: Sequence[Object]) -> dict[Name, str]:
        """Store objects that the daemon does not have; say of each what became of it, if anything did."""
        outcomes: dict[Name, str] = {}
        with self._asking():
            for group, members in self._objects(objects):
                outcomes |= self._put(group, members)
        self._count(failed=len(objects) - len(outcomes), **Counter(outcomes.values()))
        return outcomes

    def delete(self, names: Sequence[Name]) -> list[tuple[Name, int]]:
        """Remove objects; return those that are gone, with their bytes."""
        gone: list[tuple[Name, int]] = []
        with self._asking():
            for group, members in self._grouped(names, lambda _: None):
                gone.extend(
                    (name, self._shapes[name.place].nbytes) for name in members if self._removed(group, name)
                )
        return gone

    def counts(self) -> dict[str, int]:
        """Return how many objects had which fate so far."""
        with self._count_lock:
            return dict(self._counts)

    def _matched(self, group: Group, names: Sequence[Name]) -> set[Name]:
        identity, salt = group
        asked = time.monotonic()
        keys, client = [name.key for name in names], self.link.client
        matches = self.link.named(
            identity,
            lambda name: client.match(name, keys, lease=LEASE_S, salt=salt, deadline=self._lookup_seconds),
        )
        if matches.lease:
            self._locks.taken(matches.lease.id, names[: len(matches.prefix)], asked + matches.lease.seconds)
        return {name for name, block in zip(names, matches.blocks, strict=True) if block.tier is not None}

    def _fetched(self, group: Group, objects: Sequence[Object]) -> set[Name]:
        identity, salt = group
        keys, out = [one.name.key for one in objects], [one.memory for one in objects]
        client, seconds = self.link.client, self._seconds
        answers = self.link.named(
            identity, lambda name: list(client.get_many(name, keys, out=out, salt=salt, deadline=seconds))
        )
        return {
            one.name
            for one, (_, data) in zip(objects, answers, strict=True)
            if data is not None and data.nbytes == one.memory.nbytes
        }

    def _put(self, group: Group, objects: Sequence[Object]) -> dict[Name, str]:
        identity, salt = group
        by_key, client, seconds = {one.name.key: one for one in objects}, self.link.client, self._seconds
        known = self.link.named(
            identity, lambda name: client.match(name, list(by_key), salt=salt, deadline=seconds)
        )
        there = {block.key for block in known.blocks if block.tier is not None}
        outcomes = {one.name: "duplicate" for one in objects if one.name.key in there}
        for run in self._runs(group, [one for key, one in by_key.items() if key not in there]):
            results = self.link.named(identity, partial(self._sent, run, salt))
            outcomes |= {by_key[result.key].name: str(result.outcome) for result in results}
        return outcomes

    def _sent(
        self, run: Sequence[tuple[BlockHead, memoryview]], salt: bytes, name: str
    ) -> Sequence[BlockResult]:
        return self.link.client.put_many(name, run, salt=salt, deadline=self._seconds)

    def _removed(self, group: Group, one: Name) -> bool:
        identity, salt = group
        client, seconds = self.link.client, self._seconds
        return self.link.named(
            identity, lambda name: client.delete(name, one.key, salt=salt, deadline=seconds)
        )

    def _runs(self, group: Group, objects: Sequence[Object]) -> Iterator[list[tuple[BlockHead, memoryview]]]:
        """Split objects into those whose place in a sequence is known, in order, and single others.

        A daemon takes the order of a request for descent where nothing is said of it.
        """
        placed = []
        for one in objects:
            tokens, position = one.shape.tokens, self._chains.find(group, one.name.key)
            if position is None:
                yield [(BlockHead(one.name.key, tokens), one.memory)]
            else:
                first = position.number * tokens
                placed.append((BlockHead(one.name.key, tokens, first, position.parent), one.memory))
        if placed:
            yield sorted(placed, key=lambda block: block[0].first_token or 0)

    def _objects(self, objects: Sequence[Object]) -> Iterable[tuple[Group, list[Object]]]:
        shapes = {one.name: one.shape for one in objects}
        by_name = {one.name: one for one in objects}
        for group, names in self._grouped(list(by_name), shapes.get):
            yield group, [by_name[name] for name in names]

    def _grouped(
        self, names: Collection[Name], shape: Callable[[Name], Shape | None]
    ) -> Iterable[tuple[Group, list[Name]]]:
        """Sort names by namespace and salt; those whose namespace is not known are left out.

        Where LMCache does not say what an object looks like, it is what the last one of its place did.
        """
        groups: dict[Group, list[Name]] = {}
        identities: dict[tuple[Place, Shape], Identity | None] = {}
        for name in names:
            if (looks := shape(name) or self._shapes.get(name.place)) is None:
                continue
            self._shapes[name.place] = looks
            if (name.place, looks) not in identities:
                identities[name.place, looks] = self._identity(name.place, looks)
            if (identity := identities[name.place, looks]) is not None:
                groups.setdefault((identity, name.salt), []).append(name)
        return groups.items()

    def _identity(self, place: Place, shape: Shape) -> Identity | None:
        if (facts := self._facts(place.model)) is None:
            return None
        try:
            return identity_of(place, shape, facts, version=self._version)
        except KvtcdError as error:
            self._log.error("kvtcd: objects of %s are neither stored nor loaded: %s", place.model, error)
            return None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Reach for a daemon that was away, once it is worth a try; end what it does not do as a miss."""
        self.link.reach()
        with self.link.asking():
            yield

    def _count(self, **objects: int) -> None:
        with self._count_lock:
            self._counts.update(objects)
