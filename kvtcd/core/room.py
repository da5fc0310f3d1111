"""Who gets room, and who makes room: the pass that follows every event.

Three queues wait for room and hold nothing while they wait: puts and promotions for the host tier,
demotions for the disk tier. Room is made one tier down at a time, coldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from kvtcd.core.entry import Entry, Kind, State, Transfer
from kvtcd.core.events import Deny, Grant, Put, Reason, Tier
from kvtcd.core.keys import RecordKey
from kvtcd.core.residency import Residents
from kvtcd.core.victims import victims


class Room:
    """The queues for room in each tier.

    Args:
        residents: who is where.
        bound: largest packed size, in bytes of the disk tier, of a block of so many raw bytes.
        demotions: how many demotions may run at once.

    Attributes:
        puts: by ticket.
        promotions: the tickets of those who wait for each block to come up.
        demotions: blocks to copy down.
    """

    def __init__(self, residents: Residents, bound: Callable[[int], int], *, demotions: int) -> None:
        self.puts: OrderedDict[int, Put] = OrderedDict()
        self.promotions: OrderedDict[RecordKey, list[int]] = OrderedDict()
        self.demotions: OrderedDict[RecordKey, None] = OrderedDict()
        self.demoting = 0
        self._residents = residents
        self._bound = bound
        self._max_demotions = demotions

    def forget(self, key: RecordKey) -> None:
        """Let a block wait for room no more."""
        self.promotions.pop(key, None)
        self.demotions.pop(key, None)

    def known(self, put: Put) -> bool:
        """Answer a put of a block that is here or on its way in; tell whether that was so.

        A block that is just going, deleted or damaged, is not known: its successor waits until it has gone.
        """
        residents = self._residents
        entry = residents.entries.get(put.key)
        if entry is None or entry.doomed:
            return False
        if residents.tiers(put.key):
            residents.use(put.key)
            residents.actions.append(Deny(put.ticket, Reason.DUPLICATE))
            return True
        if any(copy.state is State.FILLING for copy in entry.copies.values()):
            residents.actions.append(Deny(put.ticket, Reason.FILLING))
            return True
        return False

    def too_large_below(self, key: RecordKey) -> bool:
        """Tell whether the bound of a block's packed size is over the whole disk tier."""
        disk = self._residents.shelves.get(Tier.DISK)
        return disk is None or self.disk_need(self._residents.entries[key].raw_bytes) > disk.capacity

    def unsettleable(self, key: RecordKey) -> Reason | None:
        """Return why a block can never be on disk, None if it can."""
        if not self._residents.tiers(key):
            return Reason.NOT_FOUND
        entry = self._residents.entries[key]
        if entry.ready(Tier.DISK):
            return None
        if not entry.kind.packable or Tier.DISK not in self._residents.shelves:
            return Reason.NO_TIER
        return Reason.TOO_LARGE if self.too_large_below(key) else None

    def share_out(self) -> None:
        """Start whatever finds room, and make room for what does not. Fastest tier first."""
        wanted = self._start_promotions() + self._grant_puts()
        below = self._relieve_host(wanted)
        below = self._start_demotions() or below
        if Tier.DISK in self._residents.shelves:
            disk = self._residents.shelves[Tier.DISK]
            for entry in victims(self._residents, Tier.DISK, disk.excess(below)):
                self._residents.lose(entry, Tier.DISK, Reason.NO_TIER)

    def _start_promotions(self) -> int:
        """Start what finds room; return the bytes the first one without room needs."""
        host = self._residents.shelves[Tier.HOST]
        for key in list(self.promotions):
            entry = self._residents.entries[key]
            need = host.footprint(entry.raw_bytes)
            if key in self._residents.transfers or entry.host or not entry.ready(Tier.DISK):
                continue  # the move runs already, or a copy is just being dropped
            if not host.fits(need):
                return need
            self._residents.begin(entry, Transfer(Tier.DISK, Tier.HOST, leaving=False), need)
        return 0

    def _grant_puts(self) -> int:
        """Grant what finds room, in order; return the bytes the first one without room needs."""
        residents = self._residents
        host = residents.shelves[Tier.HOST]
        for ticket, put in list(self.puts.items()):
            need = host.footprint(put.nbytes)
            if not self.known(put):
                if put.key in residents.entries:
                    continue
                if not host.fits(need):
                    return need
                residents.admit(self._entry(put), Tier.HOST, State.FILLING, need)
                residents.actions.append(Grant(ticket))
            del self.puts[ticket]
        return 0

    def _entry(self, put: Put) -> Entry:
        residents = self._residents
        if put.supersedes is not None:
            residents.superseding[put.key] = put.supersedes
        kind = Kind(put.namespace, put.tokens, put.nbytes, put.behind, put.packable)
        expires = None if put.ttl is None else residents.now + put.ttl
        return Entry(put.key, kind, put.position, put.parent, expires)

    def _relieve_host(self, wanted: int) -> int:
        """Move the coldest down, or drop what is safe below; return the disk bytes one of them lacks."""
        residents = self._residents
        host = residents.shelves[Tier.HOST]
        # Moving down ahead of need costs little; losing ahead of need would cost hits.
        excess = host.excess(wanted) if Tier.DISK in residents.shelves else host.shortfall(wanted)
        for entry in victims(residents, Tier.HOST, excess):
            if entry.ready(Tier.DISK):
                residents.drop(entry, Tier.HOST)
            elif entry.failed or not entry.kind.packable or self.too_large_below(entry.key):
                residents.lose(entry, Tier.HOST, Reason.NO_TIER)
            elif self.demoting >= self._max_demotions:
                break
            elif lack := self._begin_demotion(entry, leaving=True):
                return lack
        return 0

    def _start_demotions(self) -> int:
        """Start queued demotions; return the disk bytes the first one without room needs."""
        # A look at the head is enough: what is passed over there moves already, and its end brings us back.
        for key in tuple(islice(self.demotions, 2 * self._max_demotions)):
            if self.demoting >= self._max_demotions:
                break
            entry = self._residents.entries[key]
            if entry.ready(Tier.DISK) or not entry.ready(Tier.HOST):
                del self.demotions[key]
            elif key not in self._residents.transfers and (
                lack := self._begin_demotion(entry, leaving=False)
            ):
                return lack
        return 0

    def _begin_demotion(self, entry: Entry, *, leaving: bool) -> int:
        """Start a demotion; return the bytes it lacks, 0 if none."""
        residents, need = self._residents, self.disk_need(entry.raw_bytes)
        if entry.disk:
            return 0  # an older copy is just being dropped; its end brings us here again
        if not residents.shelves[Tier.DISK].fits(need):
            return need
        self.demotions.pop(entry.key, None)
        entry.evict |= leaving
        self.demoting += 1
        residents.begin(entry, Transfer(Tier.HOST, Tier.DISK, leaving), need)
        return 0

    def disk_need(self, raw_bytes: int) -> int:
        """Return the bytes to reserve on disk for a block of `raw_bytes`."""
        return self._residents.shelves[Tier.DISK].footprint(self._bound(raw_bytes))
