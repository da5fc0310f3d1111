"""The one mind: it is told events and answers with actions; it moves nothing itself.

Theory of operation
===================

A block (`Entry`) has at most one copy in each place: raw on a GPU, raw on the host, packed on the host,
packed on disk. States of a copy:

======== ========================================== ===================
from     on                                         to
======== ========================================== ===================
absent   room reserved (put granted, move begun)    FILLING
FILLING  Filled, Moved / Abandoned, MoveFailed      READY / DROPPING
READY    victim, deleted, damaged                   DROPPING
DROPPING Dropped                                    absent
======== ========================================== ===================

Ways of a block, all of them moves between two places::

    put -> host -> packed -> disk       down: to make room, to be durable; packing happens once
           host -----------> disk
    gpu <- host <- packed <- disk       up: for a reader; unpacking
                   packed <- disk       as it is, if there is room to spare
              gpu, packed, disk         read where it lies, by who copies or unpacks it elsewhere
    put ---------> packed -> disk       one that arrives from another host, packed

Rules, each of them tested after every event of random histories:

1. *Never nowhere*: the last copy of a block goes only when it is evicted from the last tier it may be in,
   deleted, damaged or superseded, or for a newcomer when the packer is behind. A copy on a GPU is no copy
   to count on; it goes with the last other one.
2. A block has at most one transfer. Its source is READY and stays while the transfer runs.
3. A copy that is read is READY and stays; of one that proves damaged, goes with its file, or is none to count
   on, the Drop comes behind its last reader. A leased block keeps some copy, but for damage and deletion.
4. *Waiting pins nothing*: who waits for room holds no copy and no bytes.
5. Room is reserved before bytes move, on the accounts of namespace, tenant and tier; a move down reserves
   the bound of its packed size and gives the rest back.
6. A copy on a GPU lies on the one that is the home of its namespace; one that lies elsewhere since policies
   changed goes as soon as no move needs it. What is full, and who goes, is asked of each GPU by itself.

What a put offers is *seen*, and so is what a get asks for; nothing else is a sight (a match is not: a
scheduler repeats it). A put is refused as not admitted when its block was not seen often enough (`on_sight`),
or when the tier it would end in is full of blocks worth more. Time is read once per event; a block that has
expired is served no more, and dropped when it is asked for or when a sweep of `Tick` comes by.

After every event one pass, fastest tier first, starts whatever can start (`core.room`) and makes room for
what cannot (`core.relief`); victims only ever go down, so one pass reaches the fixpoint. A put is granted or
refused, never forgotten. Blocks of one request become readable together (`Filled` is sent at its end), so
that what follows a block is known when it is packed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from kvtcd.core import events as ev
from kvtcd.core.answers import Answers
from kvtcd.core.events import Action, Event
from kvtcd.core.gpus import Gpus
from kvtcd.core.keys import RecordKey
from kvtcd.core.leases import Leases
from kvtcd.core.outcomes import Outcomes
from kvtcd.core.place import Place, Tier
from kvtcd.core.relief import Relief
from kvtcd.core.requests import Requests
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room
from kvtcd.core.shelf import Shelf
from kvtcd.core.sightings import Sightings

SWEEP = 4096
"""Blocks that one tick looks at."""


class Catalog:
    """Residency of all blocks of one daemon.

    Args:
        shelves: sums of host and disk, if there is one.
        bound: largest packed size, in bytes of the disk tier, of a block of so many raw bytes.
        sightings: told of every sight; shared with the orders of the shelves that count them.
        gpus: those that hold blocks.
        descents: how many moves down may run at once.
        clock: seconds; must not go back.
    """

    def __init__(
        self,
        shelves: dict[Tier, Shelf],
        bound: Callable[[int], int],
        sightings: Sightings,
        *,
        gpus: Gpus | None = None,
        descents: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.residents = Residents(shelves, gpus or Gpus())
        self.room = Room(self.residents, bound, descents=descents)
        self._answers = answers = Answers(self.residents, self.room)
        self._hits = Sightings(sightings.period, sightings.width)
        self._requests = Requests(
            self.residents, self.room, answers, bound=bound, sightings=sightings, hits=self._hits
        )
        self._outcomes = Outcomes(self.residents, self.room, answers)
        self._relief = Relief(self.residents, self.room, answers.held)
        self._leases = Leases(self.residents)
        self._sightings, self._clock = sightings, clock
        self._round: list[RecordKey] = []
        self._read_clock()

    def _read_clock(self) -> None:
        now = int(self._clock())
        if now != self.residents.now:  # one number for all that is stamped within a second
            self.residents.now = self._sightings.now = self._hits.now = now
            if disk := self.residents.shelves.get(Tier.DISK):
                disk.try_more(now)

    def current(self) -> Residents:
        """Return who is where at this moment, to be asked and not to be changed."""
        self._read_clock()
        return self.residents

    def places(self, key: RecordKey) -> tuple[Place, ...]:
        """Return the places that can serve a block, fastest first; empty when none can."""
        return self.current().places(key)

    def tiers(self, key: RecordKey) -> tuple[Tier, ...]:
        """Return the tiers that can serve a block, fastest first; empty when none can."""
        return tuple(dict.fromkeys(place.tier for place in self.places(key)))

    def blocks(self, namespace: int) -> tuple[RecordKey, ...]:
        """Return the keys of a namespace."""
        return tuple(key for key, entry in self.residents.entries.items() if entry.namespace == namespace)

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; return what is to be done, in order."""
        self._read_clock()
        self._take_in(event)
        self._relief.share_out()
        actions, self.residents.actions = self.residents.actions, []
        return actions

    def _sweep(self) -> None:
        """Look at the next blocks of a round through all of them; some may have gone since it began."""
        self._round = self._round or list(self.residents.entries)
        for key in self._round[-SWEEP:]:
            self._answers.expire(key)
        del self._round[-SWEEP:]

    def _take_in(self, event: Event) -> None:
        residents = self.residents
        match event:
            case ev.Govern():
                self._requests.govern(event)
            case ev.Mark(policy):
                residents.mark(policy)
            case ev.Close(namespace):
                self._requests.close(namespace)
            case ev.Ungovern(namespace):
                residents.ungovern(namespace)
            case ev.Put():
                self._requests.put(event)
            case ev.Filled(key, place):
                self._outcomes.filled(residents.entries[key], place)
            case ev.Abandoned(key, place):
                residents.drop(residents.entries[key], place)
            case ev.Get(ticket, key, straight):
                self._requests.get(ticket, key, straight)
            case ev.Release(key, place, damaged):
                self._outcomes.released(key, place, damaged=damaged)
            case ev.Prefetch(ticket, key, tier):
                self._requests.prefetch(ticket, key, tier)
            case ev.Lease(ticket, keys):
                self._answers.answer(ticket, self._leases.take(keys))
            case ev.Unlease(keys):
                self._leases.give_back(keys)
            case ev.Touch(keys):
                for key in reversed(keys):
                    residents.renew(key)
            case ev.Settle(ticket, keys, evict):
                self._requests.settle(ticket, keys, evict=evict)
            case ev.Delete(ticket, keys):
                self._requests.delete(ticket, keys)
            case ev.Cancel(ticket):
                self._answers.cancel(ticket)
            case ev.Moved(key, nbytes):
                self._outcomes.moved(key, nbytes)
            case ev.MoveFailed(key, damaged, full):
                self._outcomes.move_failed(key, damaged=damaged, full=full)
            case ev.Dropped(key, place):
                self._outcomes.dropped(key, place)
            case ev.Unlinked(keys):
                for key in keys:
                    self._outcomes.unlinked(key)
            case ev.Recovered(found):
                residents.recover(found)
            case ev.Tick():
                self._sweep()
            case _:
                assert_never(event)
