"""What is where and what was found, counted for each namespace as it changes: asking costs no walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtcd.core.entry import Entry
from kvtcd.core.events import Found
from kvtcd.core.place import Place, Tier
from kvtcd.engine.changes import Change, Left, Moved, Stored
from kvtcd.engine.metrics import Metrics


@dataclass(slots=True)
class PlaceCounts:
    """Copies in one place.

    Attributes:
        blocks: that can be read from it now.
        bytes: of these.
        raw_bytes: of the blocks that these stand for, so `raw_bytes / bytes` is the ratio.
        hits: blocks that were read and lay nowhere higher.
        promotions: copies that came up to it.
        demotions: copies that came down to it.
        dropped: copies that it let go, by reason.
    """

    blocks: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    hits: int = 0
    promotions: int = 0
    demotions: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: PlaceCounts) -> None:
        """Add the counts of others."""
        self.blocks += other.blocks
        self.bytes += other.bytes
        self.raw_bytes += other.raw_bytes
        self.hits += other.hits
        self.promotions += other.promotions
        self.demotions += other.demotions
        self.dropped += other.dropped


@dataclass(slots=True)
class Counts:
    """One namespace, or all of them.

    Attributes:
        misses: reads of blocks that were nowhere.
        fetched: reads for which a block came from the shared store; they are hits of no place.
        places: by `Place`.
    """

    misses: int = 0
    fetched: int = 0
    places: list[PlaceCounts] = field(default_factory=lambda: [PlaceCounts() for _ in Place])

    def blocks(self, tier: Tier) -> int:
        """Return the copies in a tier, in either form."""
        return sum(self.places[place].blocks for place in Place if place.tier is tier)

    def add(self, other: Counts) -> None:
        """Add the counts of others."""
        self.misses += other.misses
        self.fetched += other.fetched
        for mine, theirs in zip(self.places, other.places, strict=True):
            mine.add(theirs)


class Tally:
    """Counts.

    Args:
        metrics: told of copies that are let go.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._namespaces: dict[int, Counts] = {}
        self._gone = Counts()
        self._uncounted: set[int] = set()

    @property
    def total(self) -> Counts:
        """The counts of all namespaces, those that are gone included."""
        total = Counts()
        total.add(self._gone)
        for number, counts in self._namespaces.items():
            if number not in self._uncounted:
                total.add(counts)
        return total

    def ignore(self, namespace: int) -> None:
        """Leave a namespace out of all sums."""
        self._uncounted.add(namespace)

    def of(self, namespace: int) -> Counts:
        """Return the counts of a namespace."""
        counts = self._namespaces.get(namespace)
        if counts is None:
            counts = self._namespaces[namespace] = Counts()
        return counts

    def forget(self, namespace: int) -> None:
        """Forget a namespace that is gone."""
        counts = self._namespaces.pop(namespace, None)
        if counts and namespace not in self._uncounted:
            self._gone.add(counts)
        self._uncounted.discard(namespace)

    def found(self, namespace: int, where: Place | Literal[Tier.REMOTE] | None) -> None:
        """Count a read by where the block was; None: nowhere."""
        counts = self.of(namespace)
        if where is None:
            counts.misses += 1
        elif where is Tier.REMOTE:
            counts.fetched += 1
        else:
            counts.places[where].hits += 1

    def recovered(self, copy: Found) -> None:
        """Count a copy that was on disk when the daemon started."""
        counts = self.of(copy.namespace).places[Place.DISK]
        counts.blocks += 1
        counts.bytes += copy.nbytes
        counts.raw_bytes += copy.raw_bytes

    def count(self, changes: Sequence[Change]) -> None:
        """Count changes; called before anything that they speak of is carried out."""
        for change in changes:
            places = self.of(change.entry.namespace).places
            match change:
                case Stored(entry, place):
                    _come(places[place], entry, place)
                case Moved(entry, source, target):
                    _come(places[target], entry, target)
                    if target < source:
                        places[target].promotions += 1
                    else:
                        places[target].demotions += 1
                case Left(entry, place, reason):
                    places[place].blocks -= 1
                    places[place].bytes -= _nbytes(entry, place)
                    places[place].raw_bytes -= entry.raw_bytes
                    places[place].dropped[reason] += 1
                    if entry.namespace not in self._uncounted:
                        self._metrics.dropped.labels(place, reason).inc()


def _come(counts: PlaceCounts, entry: Entry, place: Place) -> None:
    counts.blocks += 1
    counts.bytes += _nbytes(entry, place)
    counts.raw_bytes += entry.raw_bytes


def _nbytes(entry: Entry, place: Place) -> int:
    copy = entry.at(place)
    assert copy is not None, "what comes or goes is there"
    return copy.nbytes
