"""What became of the catalog's actions: bytes arrived, moved, could not be moved, are gone."""

from __future__ import annotations

from kvtcd.core.answers import Answers
from kvtcd.core.entry import Entry, Transfer
from kvtcd.core.events import Lost
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room


class Outcomes:
    """Takes in what the world says, and answers those who waited for it.

    Args:
        residents: who is where.
        room: who waits for room.
        answers: who waits for a block.
    """

    def __init__(self, residents: Residents, room: Room, answers: Answers) -> None:
        self._residents, self._room, self._answers = residents, room, answers

    def moved(self, key: RecordKey, nbytes: int) -> None:
        """Take in a copy that was moved."""
        entry, residents = self._residents.entries[key], self._residents
        target = self._end(entry).target
        if target is Place.DISK:
            residents.refused.discard(key)
        self.arrived(entry, target, nbytes)

    def _end(self, entry: Entry) -> Transfer:
        transfer = self._residents.end(entry)
        self._room.descending -= transfer.down
        return transfer

    def filled(self, entry: Entry, place: Place) -> None:
        """Make the first copy of a block READY; one that arrived packed goes to disk behind that, too."""
        self.arrived(entry, place)
        if place is Place.PACKED and entry.ready(place):
            self._behind(entry)

    def arrived(self, entry: Entry, place: Place, nbytes: int | None = None) -> None:
        """Make a FILLING copy READY and serve those who waited for it."""
        key, answers = entry.key, self._answers
        self._residents.ready(entry, place, nbytes)
        if key not in self._residents.doomed:
            match place:
                case Place.DISK:
                    answers.grant(*answers.durable.done(key))
                case Place.HOST:
                    self._up(entry)
                case Place.GPU:
                    self._lifted(entry)
                case Place.PACKED:
                    pass  # nobody waits for that
            self._supersede(entry)
        self._residents.let_go(entry)

    def _up(self, entry: Entry) -> None:
        """Serve those who waited for a raw copy on the host, and see to one on disk."""
        key, residents = entry.key, self._residents
        self._answers.let_read(key, Place.HOST, *self._room.promotions.pop(key, []))
        self._answers.grant(*self._answers.prefetched[Tier.HOST].done(key))
        if key in self._room.passing:
            self._room.passing.discard(key)
            residents.outgoing.setdefault(key, (Place.HOST,))
        self._behind(entry)

    def _lifted(self, entry: Entry) -> None:
        """Serve those who waited for a copy on a GPU; one that is no more at home is of no use to them."""
        key, awaited = entry.key, self._answers.prefetched[Tier.GPU]
        if self._residents.gpus.at_home(key, entry.namespace):
            self._answers.grant(*awaited.done(key))
        elif reason := self._room.unliftable(entry):
            self._answers.not_lifted(key, reason)
        elif key in awaited:
            self._room.lifts[key] = None

    def _behind(self, entry: Entry) -> None:
        """Have a block copied to disk that is not there, if its policy says so."""
        key, residents = entry.key, self._residents
        behind = residents.rules[entry.namespace].policy.disk.write == "behind"
        absent = behind and not entry.ready(Place.DISK)
        if absent and not self._room.unsettleable(key) and self._room.welcome(entry):
            self._room.demotions[key] = None

    def _supersede(self, entry: Entry) -> None:
        """Doom the partial sibling once this block is as safe as the sibling was."""
        sibling = self._residents.superseding.get(entry.key)
        older = sibling and self._residents.entries.get(sibling)
        if older and (older.disk is None or entry.ready(Place.DISK)):
            del self._residents.superseding[entry.key]
            self._answers.doom(older, Reason.DELETED)

    def move_failed(self, key: RecordKey, *, damaged: bool, full: bool) -> None:
        """Give back the room of a copy that could not be made, and drop a source that proved damaged.

        A block that a full disk refuses is offered once more, when colder ones have made room.
        """
        residents, answers = self._residents, self._answers
        entry = residents.entries[key]
        transfer = self._end(entry)
        residents.drop(entry, transfer.target)
        if damaged:
            self._damaged(entry, transfer.source)
            if transfer.target is Place.DISK and entry.kept():
                self._room.demotions[key] = None  # the raw copy is packed anew
        elif transfer.target is Place.HOST:
            answers.not_up(key, Reason.FAILED)
        elif transfer.target is Place.GPU:
            answers.not_lifted(key, Reason.FAILED)
        elif transfer.target is Place.DISK and not (full and self._offer_again(entry)):
            answers.not_down(key, Reason.FAILED)
        if transfer.down and not damaged and key not in self._room.demotions:
            residents.outgoing.pop(key, None)
            residents.failed.add(key)  # never tried in a loop
        residents.let_go(entry)

    def _damaged(self, entry: Entry, place: Place) -> None:
        """Drop a copy that cannot be read, and tell those whom it was for."""
        residents, answers, key = self._residents, self._answers, entry.key
        residents.drop(entry, place)
        if not entry.kept():
            residents.actions.append(Lost(key, entry.namespace, Reason.DAMAGED))
            answers.disappoint(key, Reason.DAMAGED)
        elif place is Place.DISK:
            answers.deny(answers.evicted, key, Reason.DAMAGED)

    def released(self, key: RecordKey, place: Place, *, damaged: bool) -> None:
        """Note that a reader is done, and drop what he found damaged; while it moves, who comes next will."""
        residents, entry = self._residents, self._residents.entries[key]
        if damaged and entry.ready(place) and key not in residents.transfers:
            self._damaged(entry, place)
        residents.unpin(key, place)

    def _offer_again(self, entry: Entry) -> bool:
        """Learn that the disk holds less than it was meant to; tell whether this block waits for it again."""
        residents, room, key = self._residents, self._room, entry.key
        need = room.packed_need(entry, Place.DISK)
        if not residents.shelves[Tier.DISK].run_short(entry.namespace, need, residents.now):
            return False
        self._answers.give_up_unsettleable()
        again = key not in residents.refused and room.unsettleable(key) is None
        if again:
            residents.refused.add(key)
            room.demotions[key] = None
        return again

    def dropped(self, key: RecordKey, place: Place) -> None:
        """Note that a copy is gone."""
        entry = self._residents.entries[key]
        self._residents.dropped(entry, place)
        if not entry.copies:
            self._answers.disappoint(key, Reason.NOT_FOUND)
            self._answers.grant(*self._answers.deleted.done(key))
        elif self._answers.settled(key, evict=True):
            self._answers.grant(*self._answers.evicted.done(key))
        if key in self._room.lifts and not entry.host and key not in self._room.promotions:
            self._not_lifted(entry)

    def unlinked(self, key: RecordKey) -> None:
        """Give up a disk copy whose file is gone; one that just moves proves damaged when that fails."""
        residents, answers = self._residents, self._answers
        entry = residents.entries.get(key)
        if entry is None or not entry.ready(Place.DISK) or key in residents.transfers:
            return
        residents.lose(entry, Place.DISK, Reason.NO_TIER)
        answers.deny(answers.evicted, key, Reason.FAILED)
        if not entry.kept():
            answers.disappoint(key, Reason.NOT_FOUND)

    def _not_lifted(self, entry: Entry) -> None:
        """See to a block that had to leave the host before there was room for it on the GPU."""
        if entry.key not in self._answers.prefetched[Tier.GPU]:
            del self._room.lifts[entry.key]
        elif self._room.too_large(entry):  # by now
            self._answers.not_lifted(entry.key, Reason.TOO_LARGE)
        else:
            self._room.promotions[entry.key] = []
