"""The one mind: it is told events and answers with actions; it moves nothing itself.

Theory of operation
===================

A block (`Entry`) has at most one copy in each tier. States of a copy:

======== ========================================== ===================
from     on                                         to
======== ========================================== ===================
absent   room reserved (put granted, move begun)    FILLING
FILLING  Filled, Moved / Abandoned, MoveFailed      READY / DROPPING
READY    victim, deleted, damaged                   DROPPING
DROPPING Dropped                                    absent
======== ========================================== ===================

Rules, each of them tested after every event of random histories:

1. *Never nowhere*: the last copy of a block goes only when it is evicted from the last tier, deleted,
   damaged or superseded.
2. A block has at most one transfer. Its source is READY and stays while the transfer runs.
3. A pinned host copy is READY and stays.
4. *Waiting pins nothing*: who waits for room holds no copy and no bytes.
5. Room is reserved before bytes move; a demotion reserves the bound of its packed size and gives the rest
   back.

What a put offers is *seen*, and so is what a get asks for; nothing else is a sight (a match is not: a
scheduler repeats it). A put is refused as not admitted when its block was not seen often enough (`on_sight`),
or when the tier it would end in is full of blocks worth more. Time is read once per event; a block that has
expired is served no more, and dropped when it is asked for or when a sweep of `Tick` comes by.

After every event one pass, fastest tier first, starts whatever can start (`core.room`); victims only ever go
one tier down, so one pass reaches the fixpoint. A put is granted or refused, never forgotten. Blocks of one
request become readable together (`Filled` is sent at its end), so that what follows a block is known when it
is packed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from kvtcd.core import events as ev
from kvtcd.core.admission import admits
from kvtcd.core.entry import Entry, Kind, State
from kvtcd.core.events import Action, Deny, Event, Grant, Lost, Reason, Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room
from kvtcd.core.shelf import Shelf
from kvtcd.core.sightings import Sightings
from kvtcd.core.waiting import Gathering

SWEEP = 4096
"""Blocks that one tick looks at."""


class Catalog:
    """Residency of all blocks of one daemon.

    Args:
        shelves: sums of each tier that exists; the host tier must.
        bound: largest packed size, in bytes of the disk tier, of a block of so many raw bytes.
        sightings: told of every sight; shared with the orders of the shelves that count them.
        demotions: how many demotions may run at once.
        clock: seconds; must not go back.
    """

    def __init__(
        self,
        shelves: dict[Tier, Shelf],
        bound: Callable[[int], int],
        sightings: Sightings,
        *,
        demotions: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.residents = Residents(shelves)
        self.room = Room(self.residents, bound, demotions=demotions)
        self.durable, self.evicted, self.deleted = Gathering(), Gathering(), Gathering()
        self._sightings, self._clock = sightings, clock
        self._read_clock()

    def _read_clock(self) -> None:
        now = int(self._clock())
        if now != self.residents.now:  # one number for all that is stamped within a second
            self.residents.now = self._sightings.now = now

    def tiers(self, key: RecordKey) -> tuple[Tier, ...]:
        """Return the tiers that can serve a block, fastest first; empty when none can."""
        self._read_clock()
        return self.residents.tiers(key)

    def blocks(self, namespace: int) -> tuple[RecordKey, ...]:
        """Return the keys of a namespace."""
        return tuple(key for key, entry in self.residents.entries.items() if entry.namespace == namespace)

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; return what is to be done, in order."""
        self._read_clock()
        match event:
            case ev.Put():
                self._put(event)
            case ev.Filled(key):
                self._arrived(self.residents.entries[key], Tier.HOST)
            case ev.Abandoned(key):
                self.residents.drop(self.residents.entries[key], Tier.HOST)
            case ev.Get(ticket, key):
                self._get(ticket, key)
            case ev.Release(key):
                entry = self.residents.entries[key]
                entry.pins -= 1
                self.residents.let_go(entry)
            case ev.Touch(keys):
                for key in reversed(keys):
                    self.residents.renew(key)
            case ev.Settle(ticket, keys, evict):
                self._settle(ticket, keys, evict=evict)
            case ev.Delete(ticket, keys):
                self._delete(ticket, keys)
            case ev.Cancel(ticket):
                self._cancel(ticket)
            case ev.Moved(key, nbytes):
                self._moved(key, nbytes)
            case ev.MoveFailed(key, damaged):
                self._move_failed(key, damaged=damaged)
            case ev.Dropped(key, tier):
                self._dropped(key, tier)
            case ev.Recovered():
                self._recovered(event)
            case ev.Tick():
                for key in self.residents.part(SWEEP):
                    self._expire(key)
            case _:
                assert_never(event)
        self.room.share_out()
        actions, self.residents.actions = self.residents.actions, []
        return actions

    def _put(self, put: ev.Put) -> None:
        host = self.residents.shelves[Tier.HOST]
        seen = self._sightings.note(put.key)
        self._expire(put.key)
        if self.room.known(put):
            return
        if host.footprint(put.nbytes) > host.capacity:
            self._deny(put.ticket, Reason.TOO_LARGE)
        elif not admits(put, seen, self.residents, self.room):
            self._deny(put.ticket, Reason.NOT_ADMITTED)
        else:
            self.room.puts[put.ticket] = put

    def _get(self, ticket: int, key: RecordKey) -> None:
        self._expire(key)
        if not self.residents.tiers(key):
            self._deny(ticket, Reason.NOT_FOUND)
            return
        self._sightings.note(key)
        entry, host = self.residents.entries[key], self.residents.shelves[Tier.HOST]
        if key not in self.evicted:
            entry.evict = False  # it is wanted again: let it stay when its move ends
        self.residents.use(key)
        if entry.ready(Tier.HOST):
            entry.pins += 1
            self._grant(ticket)
        elif host.footprint(entry.raw_bytes) > host.capacity:
            self._deny(ticket, Reason.TOO_LARGE)
        else:
            self.room.promotions.setdefault(key, []).append(ticket)

    def _settle(self, ticket: int, keys: tuple[RecordKey, ...], *, evict: bool) -> None:
        for key in keys:
            if reason := self.room.unsettleable(key):
                self._deny(ticket, reason)
                return
        pending = [key for key in keys if not self._settled(key, evict=evict)]
        if not (self.evicted if evict else self.durable).add(ticket, pending):
            self._grant(ticket)
        for key in pending:
            entry = self.residents.entries[key]
            entry.failed = False
            entry.evict |= evict
            if not entry.ready(Tier.DISK):
                self.room.demotions[key] = None
            self.residents.let_go(entry)

    def _settled(self, key: RecordKey, *, evict: bool) -> bool:
        entry = self.residents.entries[key]
        return entry.ready(Tier.DISK) and not (evict and entry.host)

    def _delete(self, ticket: int, keys: tuple[RecordKey, ...]) -> None:
        pending = [key for key in dict.fromkeys(keys) if key in self.residents.entries]
        if not self.deleted.add(ticket, pending):
            self._grant(ticket)
        for key in pending:
            self._doom(self.residents.entries[key], Reason.DELETED)

    def _doom(self, entry: Entry, reason: Reason) -> None:
        """Serve this block no more; its copies go as soon as nobody uses them."""
        entry.doomed = True
        self._disappoint(entry, reason)
        self.residents.let_go(entry)

    def _expire(self, key: RecordKey) -> None:
        """Doom a block whose time is over."""
        entry = self.residents.entries.get(key)
        if entry is not None and not entry.doomed and self.residents.expired(entry):
            self.residents.actions.append(Lost(key, entry.namespace, Reason.EXPIRED))
            self._doom(entry, Reason.EXPIRED)

    def _cancel(self, ticket: int) -> None:
        """Forget whoever waits. A promotion that runs goes on: its bytes are useful to the next reader."""
        self.room.puts.pop(ticket, None)
        for waiting in (self.durable, self.evicted, self.deleted):
            waiting.cancel(ticket)
        for key, tickets in list(self.room.promotions.items()):
            if ticket in tickets:
                tickets.remove(ticket)
                if not tickets and key not in self.residents.transfers:
                    self.room.forget(key)

    def _moved(self, key: RecordKey, nbytes: int) -> None:
        entry = self.residents.entries[key]
        self._arrived(entry, self._end(entry), nbytes)

    def _move_failed(self, key: RecordKey, *, damaged: bool) -> None:
        entry = self.residents.entries[key]
        target = self._end(entry)
        self.residents.drop(entry, target)
        self._disappoint(entry, Reason.DAMAGED if damaged else Reason.FAILED)
        if target is Tier.DISK:
            entry.failed, entry.evict = True, False  # never tried in a loop
        elif damaged:
            self.residents.drop(entry, Tier.DISK)
            self.residents.actions.append(Lost(key, entry.namespace, Reason.DAMAGED))
        self.residents.let_go(entry)

    def _end(self, entry: Entry) -> Tier:
        target = self.residents.end(entry).target
        self.room.demoting -= target is Tier.DISK
        return target

    def _arrived(self, entry: Entry, tier: Tier, nbytes: int | None = None) -> None:
        """Make a FILLING copy READY and serve those who waited for it."""
        self.residents.ready(entry, tier, nbytes)
        if not entry.doomed:
            if tier is Tier.DISK:
                self._grant(*self.durable.done(entry.key))
            else:
                readers = self.room.promotions.pop(entry.key, [])
                entry.pins += len(readers)
                self._grant(*readers)
                if entry.kind.behind and entry.kind.packable and not self.room.unsettleable(entry.key):
                    self.room.demotions[entry.key] = None
            self._supersede(entry)
        self.residents.let_go(entry)

    def _supersede(self, entry: Entry) -> None:
        """Doom the partial sibling once this block is safe wherever the sibling was."""
        sibling = self.residents.superseding.get(entry.key)
        older = sibling and self.residents.entries.get(sibling)
        if older and all(entry.ready(tier) for tier in older.copies):
            del self.residents.superseding[entry.key]
            self._doom(older, Reason.DELETED)

    def _dropped(self, key: RecordKey, tier: Tier) -> None:
        entry = self.residents.entries[key]
        self.residents.dropped(entry, tier)
        if not entry.copies:
            self._disappoint(entry, Reason.NOT_FOUND)
            self._grant(*self.deleted.done(key))
        elif self._settled(key, evict=True):
            self._grant(*self.evicted.done(key))

    def _recovered(self, found: ev.Recovered) -> None:
        kind = Kind(found.namespace, found.tokens, found.raw_bytes)
        expires = None if found.ttl is None else self.residents.now + found.ttl
        entry = Entry(found.key, kind, found.position, found.parent, expires)
        self.residents.admit(entry, Tier.DISK, State.READY, found.nbytes)

    def _grant(self, *tickets: int) -> None:
        self.residents.actions.extend(Grant(ticket) for ticket in tickets)

    def _deny(self, ticket: int, reason: Reason) -> None:
        self.residents.actions.append(Deny(ticket, reason))

    def _disappoint(self, entry: Entry, reason: Reason) -> None:
        """Deny all who wait for this block to come up or go down."""
        key = entry.key
        readers = self.room.promotions.get(key, ())
        for ticket in (*readers, *self.durable.fail(key), *self.evicted.fail(key)):
            self._deny(ticket, reason)
        self.room.forget(key)
