"""What is asked of the catalog: to store, read, fetch ahead, make durable, delete."""

from __future__ import annotations

from collections.abc import Callable

from kvtcd.core import events as ev
from kvtcd.core.admission import admits
from kvtcd.core.answers import Answers
from kvtcd.core.entry import Entry
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import MEMORY, Place, Tier
from kvtcd.core.policy import Policy
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room
from kvtcd.core.sightings import Sightings


class Requests:
    """Answers what can be answered at once, and puts the rest where it waits.

    Args:
        residents: who is where.
        room: who waits for room.
        answers: who waits for a block.
        bound: largest packed size, in bytes of the disk tier, of a block of so many raw bytes.
        sightings: told of every sight.
        hits: told of every get of a block whose policy counts them.
    """

    def __init__(
        self,
        residents: Residents,
        room: Room,
        answers: Answers,
        *,
        bound: Callable[[int], int],
        sightings: Sightings,
        hits: Sightings,
    ) -> None:
        self._residents, self._room, self._answers = residents, room, answers
        self._bound, self._sightings, self._hits = bound, sightings, hits

    def govern(self, rules: ev.Govern) -> None:
        """Let something else hold for a namespace; who waits for what can be no more is told so."""
        residents, room, answers = self._residents, self._room, self._answers
        residents.govern(rules)
        for ticket, put in list(room.puts.items()):
            if self._oversized(put):
                del room.puts[ticket]
                answers.answer(ticket, Reason.TOO_LARGE)
        for key in list(room.promotions):
            moving = residents.transfers.get(key)
            comes_up = moving is not None and moving.target is Place.HOST
            if not comes_up and room.too_large(residents.entries[key]):
                answers.not_up(key, Reason.TOO_LARGE)
        for key in list(room.lifts):
            if reason := room.unliftable(residents.entries[key]):
                answers.not_lifted(key, reason)
            elif self._is_up(residents.entries[key], Tier.GPU):  # it lay elsewhere, until its home changed
                answers.grant(*answers.prefetched[Tier.GPU].done(key))
                del room.lifts[key]
        answers.give_up_unsettleable()

    def close(self, namespace: int) -> None:
        """Deny who waits to store something in a namespace."""
        for ticket, put in list(self._room.puts.items()):
            if put.namespace == namespace:
                del self._room.puts[ticket]
                self._answers.answer(ticket, Reason.DELETED)

    def put(self, put: ev.Put) -> None:
        """Refuse a block, or let it wait for room. One that arrives was asked for: only room decides."""
        seen = 0.0 if put.arrival else self._sightings.note(put.key)
        self._answers.expire(put.key)
        if self._room.known(put):
            return
        if self._oversized(put):
            self._answers.answer(put.ticket, Reason.TOO_LARGE)
        elif not put.arrival and not admits(put, seen, self._residents, self._bound):
            self._answers.answer(put.ticket, Reason.NOT_ADMITTED)
        else:
            self._room.puts[put.ticket] = put

    def get(self, ticket: int, key: RecordKey, straight: frozenset[Place] = frozenset()) -> None:
        """Let a block be read from the host, where it may have to come up first.

        Who takes it `straight` from other places reads the fastest copy where it lies, if that is in one of
        them. That brings nothing up, whatever the policy says of promotion: this reader needs no raw copy on
        the host.
        """
        self._answers.expire(key)
        if not self._residents.places(key):
            self._answers.answer(ticket, Reason.NOT_FOUND)
            return
        self._sightings.note(key)
        self._residents.use(key)
        entry = self._residents.entries[key]
        fastest = entry.fastest
        if fastest in straight:
            self._often(entry)
            self._answers.let_read(key, fastest, ticket)
            return
        if not entry.ready(Place.HOST) and self._room.too_large(entry):
            self._answers.answer(ticket, Reason.TOO_LARGE)
            return
        stays = self._stays(entry)
        if entry.ready(Place.HOST):
            self._answers.let_read(key, Place.HOST, ticket)
        else:
            self._room.promotions.setdefault(key, []).append(ticket)
        if stays:
            self._wanted(key)
        if stays and self._policy(entry).promote.lifts and not self._room.unliftable(entry):
            self._room.lifts[key] = None

    def _wanted(self, key: RecordKey) -> None:
        """Let a block that was to leave stay when its move or its reader ends."""
        self._room.passing.discard(key)
        if key not in self._answers.evicted:
            self._residents.outgoing.pop(key, None)

    def _stays(self, entry: Entry) -> bool:
        """Count a hit; let a block pass that comes up and is not wanted often enough to stay raw."""
        stays = self._often(entry)
        if not stays and not entry.host:
            self._room.passing.add(entry.key)
        return stays

    def _often(self, entry: Entry) -> bool:
        """Count a hit; tell whether the block is wanted often enough to stay raw."""
        least = self._policy(entry).promote.on_hit
        return least <= 1 or self._hits.note(entry.key) + 0.5 >= least

    def _policy(self, entry: Entry) -> Policy:
        return self._residents.rules[entry.namespace].policy

    def _oversized(self, put: ev.Put) -> bool:
        host, packed = self._residents.shelves[Tier.HOST], put.arrival.nbytes if put.arrival else 0
        return host.footprint(max(put.nbytes, packed)) > host.room(put.namespace)

    def prefetch(self, ticket: int, key: RecordKey, tier: Tier) -> None:
        """Let a block come up that nobody reads yet."""
        self._answers.expire(key)
        if not self._residents.places(key):
            self._answers.answer(ticket, Reason.NOT_FOUND)
            return
        entry = self._residents.entries[key]
        unliftable = self._room.unliftable(entry) if tier is Tier.GPU else None
        if tier not in self._answers.prefetched or unliftable is Reason.NO_TIER:
            self._answers.answer(ticket, Reason.NO_TIER)
        elif self._is_up(entry, tier):
            self._answers.answer(ticket, None)
        elif unliftable or self._room.too_large(entry):
            self._answers.answer(ticket, Reason.TOO_LARGE)
        else:
            self._answers.prefetched[tier].add(ticket, [key])
            self._wanted(key)
            if not entry.ready(Place.HOST):
                self._room.promotions.setdefault(key, [])
            if tier is Tier.GPU:
                self._room.lifts[key] = None

    def _is_up(self, entry: Entry, tier: Tier) -> bool:
        if tier is Tier.HOST:
            return entry.ready(Place.HOST)
        return entry.ready(Place.GPU) and self._residents.gpus.at_home(entry.key, entry.namespace)

    def settle(self, ticket: int, keys: tuple[RecordKey, ...], *, evict: bool) -> None:
        """Let blocks go to disk; with `evict`, let them be nowhere else."""
        residents, answers = self._residents, self._answers
        for key in keys:
            if reason := self._room.unsettleable(key):
                answers.answer(ticket, reason)
                return
        pending = [key for key in keys if not answers.settled(key, evict=evict)]
        if not (answers.evicted if evict else answers.durable).add(ticket, pending):
            answers.answer(ticket, None)
        for key in pending:
            entry = residents.entries[key]
            residents.failed.discard(key)
            residents.refused.discard(key)
            if evict:
                residents.outgoing[key] = MEMORY
            if not entry.ready(Place.DISK):
                self._room.demotions[key] = None
            residents.let_go(entry)

    def delete(self, ticket: int, keys: tuple[RecordKey, ...]) -> None:
        """Doom blocks."""
        pending = [key for key in dict.fromkeys(keys) if key in self._residents.entries]
        if not self._answers.deleted.add(ticket, pending):
            self._answers.answer(ticket, None)
        for key in pending:
            self._answers.doom(self._residents.entries[key], Reason.DELETED)
