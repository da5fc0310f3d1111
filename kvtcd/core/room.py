"""Who gets room: the queues, and the pass that follows every event.

The queues hold nothing while they wait. In each account the first that finds no room keeps those behind it
waiting, so that nobody starves; who is booked elsewhere goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from kvtcd.core.account import Account
from kvtcd.core.admission import welcome
from kvtcd.core.entry import Entry, Kind, State, Transfer
from kvtcd.core.events import Deny, Grant, Put
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents
from kvtcd.core.shelf import Shelf

REFILLS = 256
"""Blocks that may wait to come up from disk as they are; it is a favour, and older ones are forgotten."""


class Room:
    """The queues for room in each tier.

    Args:
        residents: who is where.
        bound: largest packed size, in bytes of the disk tier, of a block of so many raw bytes.
        descents: how many moves down may run at once.

    Attributes:
        puts: by ticket.
        promotions: the tickets of those who wait for each block to come up.
        demotions: blocks to copy to disk.
        lifts: blocks to copy to the GPU that is the home of their namespace.
        refills: blocks whose packed copy may come up from disk if there is room.
        passing: blocks that come up for a reader, but do not stay.
        descending: moves down that run.
    """

    def __init__(self, residents: Residents, bound: Callable[[int], int], *, descents: int) -> None:
        self.puts: OrderedDict[int, Put] = OrderedDict()
        self.promotions: OrderedDict[RecordKey, list[int]] = OrderedDict()
        self.demotions: OrderedDict[RecordKey, None] = OrderedDict()
        self.lifts: OrderedDict[RecordKey, None] = OrderedDict()
        self.refills: OrderedDict[RecordKey, None] = OrderedDict()
        self.passing: set[RecordKey] = set()
        self.descending = 0
        self.descents = descents
        self._residents = residents
        self._bound = bound

    def stay_down(self, key: RecordKey) -> None:
        """Let a block come up no more."""
        self.promotions.pop(key, None)
        self.lifts.pop(key, None)
        self.passing.discard(key)

    def known(self, put: Put) -> bool:
        """Answer a put of a block that is here or on its way in; tell whether that was so.

        A block that is just going, deleted or damaged, is not known: its successor waits until it has gone.
        That is soon, unless leases keep it.
        """
        residents = self._residents
        entry = residents.entries.get(put.key)
        if entry is not None and put.key in residents.doomed and put.key in residents.leases:
            residents.actions.append(Deny(put.ticket, Reason.GOING))
            return True
        if entry is None or put.key in residents.doomed:
            return False
        if residents.places(put.key):
            residents.use(put.key)
            residents.actions.append(Deny(put.ticket, Reason.DUPLICATE))
            return True
        if any(copy.state is State.FILLING for copy in entry.copies.values()):
            residents.actions.append(Deny(put.ticket, Reason.FILLING))
            return True
        return False

    def packed_need(self, entry: Entry, place: Place) -> int:
        """Return the bytes to reserve for a packed copy, whose size is known only in the end."""
        return self._residents.shelves[place.tier].footprint(self._bound(entry.raw_bytes))

    def fits_ever(self, entry: Entry, place: Place) -> bool:
        """Tell whether the bound of a block's packed size is within what its namespace may have."""
        shelf = self._residents.shelves[place.tier]
        return self.packed_need(entry, place) <= shelf.room(entry.namespace)

    def welcome(self, entry: Entry) -> bool:
        """Tell whether the disk has room for a block, or worse ones to go for it."""
        disk = self._residents.shelves[Tier.DISK]
        return welcome(disk, entry.namespace, entry, self.packed_need(entry, Place.DISK))

    def unsettleable(self, key: RecordKey) -> Reason | None:
        """Return why a block can never be on disk, None if it can."""
        if not self._residents.places(key):
            return Reason.NOT_FOUND
        entry = self._residents.entries[key]
        if entry.ready(Place.DISK):
            return None
        if not self._residents.on_disk(entry.namespace):
            return Reason.NO_TIER
        return None if self.fits_ever(entry, Place.DISK) else Reason.TOO_LARGE

    def too_large(self, entry: Entry) -> bool:
        """Tell whether a raw block takes more than its namespace may have of the host."""
        host = self._residents.shelves[Tier.HOST]
        return host.footprint(entry.raw_bytes) > host.room(entry.namespace)

    def unliftable(self, entry: Entry) -> Reason | None:
        """Return why a block can never be on a GPU, None if it can."""
        home = self._residents.gpus.home(entry.namespace)
        if home is None:
            return Reason.NO_TIER
        return Reason.TOO_LARGE if home.footprint(entry.raw_bytes) > home.capacity else None

    # The pass -----------------------------------------------------------------------------------------------

    def start_lifts(self) -> dict[Shelf, int]:
        """Copy to GPUs what finds room at home; return what the first one without room on each needs."""
        residents, wanted = self._residents, dict[Shelf, int]()
        for key in list(self.lifts):
            entry = residents.entries[key]
            home = residents.gpus.home(entry.namespace)
            assert home is not None, "who has no home waits for none"
            if entry.gpu and entry.gpu.state is not State.DROPPING:
                if residents.gpus.at_home(key, entry.namespace):
                    del self.lifts[key]
            elif not entry.gpu and entry.ready(Place.HOST) and key not in residents.transfers:
                need = home.footprint(entry.raw_bytes)
                if home in wanted or home.tight(entry.namespace, need):
                    wanted.setdefault(home, need)
                    if len(wanted) == len(residents.gpus.shelves):
                        break
                else:
                    del self.lifts[key]
                    residents.begin(entry, Transfer(Place.HOST, Place.GPU, leaving=False), need)
        return wanted

    def start_promotions(self, wanted: dict[Account, int]) -> None:
        """Start what finds room on the host; note what the first one without room needs."""
        host = self._residents.shelves[Tier.HOST]
        for key in list(self.promotions):
            entry = self._residents.entries[key]
            source = next((p for p in (Place.GPU, Place.PACKED, Place.DISK) if entry.ready(p)), None)
            if key in self._residents.transfers or entry.host or source is None:
                continue  # the move runs already, or a copy is just being dropped
            need = host.footprint(entry.raw_bytes)
            if not _waits(host, entry.namespace, need, wanted):
                self._residents.begin(entry, Transfer(source, Place.HOST, leaving=False), need)
            elif host.whole in wanted:
                return

    def grant_puts(self, wanted: dict[Account, int]) -> dict[Account, int]:
        """Grant what finds room, in order; note what the first one without room needs.

        Returns:
            what those need who will not wait for others to be moved, or whom such a one waits behind.
        """
        residents, urgent = self._residents, dict[Account, int]()
        host = residents.shelves[Tier.HOST]
        for ticket, put in list(self.puts.items()):
            if not self.known(put):
                need = host.footprint(put.arrival.nbytes if put.arrival else put.nbytes)
                if put.key in residents.entries:
                    continue
                if _waits(host, put.namespace, need, wanted):
                    if not put.patient:
                        accounts = host.accounts(put.namespace)
                        urgent |= {account: wanted[account] for account in accounts if account in wanted}
                    if host.whole in wanted:  # and so all others wait too
                        if not all(other.patient for other in self.puts.values()):
                            urgent[host.whole] = wanted[host.whole]
                        break
                    continue
                residents.admit(self._entry(put), Place.PACKED if put.arrival else Place.HOST, need)
                residents.actions.append(Grant(ticket))
            del self.puts[ticket]
        return urgent

    def _entry(self, put: Put) -> Entry:
        residents = self._residents
        if put.supersedes is not None:
            residents.superseding[put.key] = put.supersedes
        ttl = put.arrival.ttl if put.arrival else residents.rules[put.namespace].policy.disk.ttl
        expires = None if ttl is None else residents.now + ttl
        return Entry(put.key, Kind(put.namespace, put.tokens, put.nbytes), put.position, put.parent, expires)

    def start_demotions(self, wanted: dict[Account, int]) -> None:
        """Copy to disk what finds room there; note what the first one without room needs."""
        # A look at the head is enough: what is passed over there moves already, and its end brings us back.
        for key in tuple(islice(self.demotions, 2 * self.descents)):
            if self.descending >= self.descents:
                return
            entry = self._residents.entries[key]
            source = Place.PACKED if entry.ready(Place.PACKED) else Place.HOST
            if entry.ready(Place.DISK) or not entry.ready(source):
                del self.demotions[key]
            elif key not in self._residents.transfers:
                self.descend(entry, source, Place.DISK, wanted, leaving=False)

    def descend(
        self, entry: Entry, source: Place, target: Place, wanted: dict[Account, int], *,
        leaving: bool, lossless: bool = False,
    ) -> bool:  # fmt: skip
        """Start a move down if there is room; tell whether it was started, and else note what it lacks."""
        residents, need = self._residents, self.packed_need(entry, target)
        if entry.at(target):
            return False  # an older copy is just being dropped; its end brings us here again
        if _waits(residents.shelves[target.tier], entry.namespace, need, wanted):
            return False
        if target is Place.DISK:
            self.demotions.pop(entry.key, None)
        if leaving:
            residents.outgoing.setdefault(entry.key, (source,))
        self.descending += 1
        residents.begin(entry, Transfer(source, target, leaving), need, lossless=lossless)
        return True

    def refill_later(self, key: RecordKey) -> None:
        """Bring a packed copy up from disk when there is room to spare."""
        self.refills[key] = None
        while len(self.refills) > REFILLS:
            self.refills.popitem(last=False)

    def start_refills(self) -> None:
        """Bring packed copies up from disk, one at a time, as long as that pushes nothing out."""
        residents, host = self._residents, self._residents.shelves[Tier.HOST]
        for key in list(self.refills):
            entry = residents.entries[key]
            if entry.packed or entry.disk is None or not entry.ready(Place.DISK):
                del self.refills[key]
            elif key not in residents.transfers:
                need, accounts = host.footprint(entry.disk.nbytes), host.accounts(entry.namespace)
                tight = [account for account in accounts if not account.fits(need) or account.excess(need)]
                if not tight:
                    del self.refills[key]
                    residents.begin(entry, Transfer(Place.DISK, Place.PACKED, leaving=False), need)
                if not tight or host.whole in tight:
                    return


def _waits(shelf: Shelf, namespace: int, need: int, wanted: dict[Account, int]) -> bool:
    """Tell whether someone must wait for room, and note in `wanted` on which account."""
    if any(account in wanted for account in shelf.accounts(namespace)):
        return True
    if (account := shelf.tight(namespace, need)) is not None:
        wanted[account] = need
        return True
    return False
