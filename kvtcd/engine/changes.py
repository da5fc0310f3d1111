"""What became of blocks, read off the catalog's events and answers: one account for all who want to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtcd.core import events as ev
from kvtcd.core.entry import Entry
from kvtcd.core.events import Action, Event, Move
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents

EVICTED, SUPERSEDED = "evicted", "superseded"
_NAMES = {Reason.NO_TIER: EVICTED}
"""A block that finds no tier below has been evicted, whoever asks."""


class Stored(NamedTuple):
    """A block can be read for the first time."""

    entry: Entry
    place: Place


class Moved(NamedTuple):
    """A block can be read from a further place."""

    entry: Entry
    source: Place
    target: Place


class Left(NamedTuple):
    """A place has a block no more; `left` are those that still have it."""

    entry: Entry
    place: Place
    reason: str
    left: tuple[Place, ...]


Change = Stored | Moved | Left


class Changes:
    """Reads changes off events and the catalog's answers, before any of these is carried out.

    Args:
        residents: the catalog's.
    """

    def __init__(self, residents: Residents) -> None:
        self._residents, self._entries = residents, residents.entries
        self._moves: dict[RecordKey, Move] = {}
        self._causes: dict[RecordKey, tuple[Entry, str]] = {}
        """Why blocks go that are on their way out."""

    def read(self, told: Event, actions: Sequence[Action]) -> list[Change]:
        """Return what an event and the answers to it changed."""
        changes: list[Change] = []
        unread: tuple[RecordKey, Place] | None = None  # a copy that goes before it could ever be read
        match told:
            case ev.Filled(key, place):
                changes.append(Stored(self._entries[key], place))
            case ev.Moved(key):
                move = self._moves.pop(key)
                changes.append(Moved(self._entries[key], move.source, move.target))
            case ev.MoveFailed(key):
                unread = key, self._moves.pop(key).target
            case ev.Abandoned(key, place):
                unread = key, place
            case ev.Delete(_, keys):
                for key in keys:
                    self._because(key, Reason.DELETED)
            case ev.Dropped(key):
                cause = self._causes.get(key)
                if cause and self._entries.get(key) is not cause[0]:
                    del self._causes[key]
            case _:
                pass
        if actions:
            self._answered(actions, unread, changes)
        return changes

    def _answered(
        self, actions: Sequence[Action], unread: tuple[RecordKey, Place] | None, changes: list[Change]
    ) -> None:
        for action in actions:
            match action:
                case ev.Move(key):
                    self._moves[key] = action
                case ev.Lost(key, _, reason):  # may come after the drop that it explains
                    self._because(key, _NAMES.get(reason, reason))
                case _:
                    pass
        for action in actions:
            match action:
                case ev.Drop(key, place) if (key, place) != unread:
                    changes.append(self._left(self._entries[key], place))

    def _because(self, key: RecordKey, reason: str) -> None:
        if entry := self._entries.get(key):
            self._causes.setdefault(key, (entry, reason))

    def _left(self, entry: Entry, place: Place) -> Left:
        of, reason = self._causes.get(entry.key, (None, ""))
        doomed = entry.key in self._residents.doomed
        if of is not entry:
            reason = SUPERSEDED if doomed else EVICTED
        left = () if doomed else tuple(p for p in Place if entry.ready(p))
        return Left(entry, place, str(reason), left)
