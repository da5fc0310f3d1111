"""What is where and what was found, counted for each namespace as it changes: asking costs no walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtcd.core.entry import Entry
from kvtcd.core.place import Place, Tier
from kvtcd.engine.changes import Change, Left, Moved, Stored
from kvtcd.engine.metrics import Metrics


@dataclass(slots=True)
class PlaceCounts:
    """Copies in one place.

    Attributes:
        blocks: that can be read from it now.
        bytes: of these.
        hits: blocks that were read and lay nowhere higher.
        promotions: copies that came up to it.
        demotions: copies that came down to it.
        dropped: copies that it let go, by reason.
    """

    blocks: int = 0
    bytes: int = 0
    hits: int = 0
    promotions: int = 0
    demotions: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Counts:
    """One namespace, or all of them; `misses` are reads of blocks that were nowhere."""

    misses: int = 0
    places: dict[Place, PlaceCounts] = field(
        default_factory=lambda: {place: PlaceCounts() for place in Place}
    )

    def blocks(self, tier: Tier) -> int:
        """Return the copies in a tier, in either form."""
        return sum(counts.blocks for place, counts in self.places.items() if place.tier is tier)


class Tally:
    """Counts.

    Args:
        metrics: told of copies that are let go.

    Attributes:
        total: of all namespaces, those that are gone included.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.total = Counts()
        self._metrics = metrics
        self._namespaces: dict[int, Counts] = {}

    def of(self, namespace: int) -> Counts:
        """Return the counts of a namespace."""
        return self._namespaces.setdefault(namespace, Counts())

    def forget(self, namespace: int) -> None:
        """Forget a namespace that is gone."""
        self._namespaces.pop(namespace, None)

    def found(self, namespace: int, place: Place | None) -> None:
        """Count a read; `place` None: the block was nowhere."""
        for counts in (self.total, self.of(namespace)):
            if place is None:
                counts.misses += 1
            else:
                counts.places[place].hits += 1

    def count(self, changes: Sequence[Change]) -> None:
        """Count changes; called before anything that they speak of is carried out."""
        for change in changes:
            for counts in (self.total, self.of(change.entry.namespace)):
                match change:
                    case Stored(entry, place):
                        _come(counts.places[place], entry, place)
                    case Moved(entry, source, target):
                        _come(counts.places[target], entry, target)
                        if target < source:
                            counts.places[target].promotions += 1
                        else:
                            counts.places[target].demotions += 1
                    case Left(entry, place, reason):
                        counts.places[place].blocks -= 1
                        counts.places[place].bytes -= _nbytes(entry, place)
                        counts.places[place].dropped[reason] += 1
            if isinstance(change, Left):
                self._metrics.dropped.labels(change.place, change.reason).inc()


def _come(counts: PlaceCounts, entry: Entry, place: Place) -> None:
    counts.blocks += 1
    counts.bytes += _nbytes(entry, place)


def _nbytes(entry: Entry, place: Place) -> int:
    copy = entry.at(place)
    assert copy is not None, "what comes or goes is there"
    return copy.nbytes
