"""Those who wait for a block to be somewhere, and what they are told."""

from __future__ import annotations

from kvtcd.core.entry import Entry
from kvtcd.core.events import Deny, Grant, Lost
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import MEMORY, Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room
from kvtcd.core.waiting import Gathering


class Answers:
    """Settles tickets: each of them once.

    Args:
        residents: who is where.
        room: who waits for room.

    Attributes:
        durable: those who wait for a copy on disk.
        evicted: those who wait for it to be the only one.
        deleted: those who wait for no copy to be left.
        prefetched: those who wait for a raw copy in a tier, but read nothing.
    """

    def __init__(self, residents: Residents, room: Room) -> None:
        self._residents, self._room = residents, room
        self.durable, self.evicted, self.deleted = Gathering(), Gathering(), Gathering()
        self.prefetched = {Tier.HOST: Gathering(), Tier.GPU: Gathering()}

    def grant(self, *tickets: int) -> None:
        """Give these what they asked for."""
        self._residents.actions.extend(Grant(ticket) for ticket in tickets)

    def let_read(self, key: RecordKey, place: Place, *tickets: int) -> None:
        """Let these read a copy, which stays until they are done."""
        if tickets:
            self._residents.pins.take(key, place, len(tickets))
        self._residents.actions.extend(Grant(ticket, place) for ticket in tickets)

    def answer(self, ticket: int, reason: Reason | None) -> None:
        """Give this one what it asked for, or say why not."""
        self._residents.actions.append(Grant(ticket) if reason is None else Deny(ticket, reason))

    def deny(self, waiting: Gathering, key: RecordKey, reason: Reason) -> None:
        """Deny those who wait for something to happen to a block."""
        for ticket in waiting.fail(key):
            self.answer(ticket, reason)

    def cancel(self, ticket: int) -> None:
        """Forget whoever waits. A promotion that runs goes on: its bytes are useful to the next reader."""
        self._room.puts.pop(ticket, None)
        for waiting in (self.durable, self.evicted, self.deleted, *self.prefetched.values()):
            waiting.cancel(ticket)
        for key, tickets in list(self._room.promotions.items()):
            if ticket in tickets:
                tickets.remove(ticket)
            awaited = tickets or any(key in waiting for waiting in self.prefetched.values())
            if not awaited and key not in self._residents.transfers:
                self._room.stay_down(key)

    def held(self, key: RecordKey) -> bool:
        """Tell whether somebody waits for a block to be on disk."""
        return key in self.durable or key in self.evicted

    def settled(self, key: RecordKey, *, evict: bool) -> bool:
        """Tell whether a block is on disk; with `evict`, whether it is only there."""
        entry = self._residents.entries[key]
        return entry.ready(Place.DISK) and not (evict and any(entry.at(place) for place in MEMORY))

    def not_up(self, key: RecordKey, reason: Reason) -> None:
        """Deny all who wait for a block to come up."""
        for ticket in self._room.promotions.get(key, ()):
            self.answer(ticket, reason)
        for waiting in self.prefetched.values():
            self.deny(waiting, key, reason)
        self._room.stay_down(key)

    def not_lifted(self, key: RecordKey, reason: Reason) -> None:
        """Deny all who wait for a block to be on a GPU."""
        self.deny(self.prefetched[Tier.GPU], key, reason)
        self._room.lifts.pop(key, None)

    def not_down(self, key: RecordKey, reason: Reason) -> None:
        """Deny all who wait for a block to be on disk."""
        for waiting in (self.durable, self.evicted):
            self.deny(waiting, key, reason)
        self._room.demotions.pop(key, None)

    def give_up_unsettleable(self) -> None:
        """Deny those who wait for a block to be on disk that can never be there, as things are now."""
        for key in list(self._room.demotions):
            if key not in self._residents.transfers and (reason := self._room.unsettleable(key)):
                self.not_down(key, reason)

    def disappoint(self, key: RecordKey, reason: Reason) -> None:
        """Deny all who wait for a block to go anywhere."""
        self.not_up(key, reason)
        self.not_down(key, reason)
        self._room.refills.pop(key, None)

    def doom(self, entry: Entry, reason: Reason) -> None:
        """Serve a block no more; its copies go as soon as nobody uses them."""
        self._residents.doomed.add(entry.key)
        self.disappoint(entry.key, reason)
        self._residents.let_go(entry)

    def expire(self, key: RecordKey) -> None:
        """Doom a block whose time is over."""
        entry = self._residents.entries.get(key)
        if entry is not None and key not in self._residents.doomed and self._residents.expired(entry):
            self._residents.actions.append(Lost(key, entry.namespace, Reason.EXPIRED))
            self.doom(entry, Reason.EXPIRED)
