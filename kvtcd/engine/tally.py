"""What is where and what was found, counted for each namespace as it changes: asking costs no walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtcd.core.entry import Entry
from kvtcd.core.events import Tier
from kvtcd.engine.changes import Change, Left, Moved, Stored
from kvtcd.engine.metrics import Metrics

_SPEED = {tier: number for number, tier in enumerate(Tier)}


@dataclass(slots=True)
class TierCounts:
    """Copies in one tier.

    Attributes:
        blocks: that can be read from it now.
        bytes: of these.
        hits: blocks that were read and lay no higher.
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
    tiers: dict[Tier, TierCounts] = field(default_factory=lambda: {tier: TierCounts() for tier in Tier})


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

    def found(self, namespace: int, tier: Tier | None) -> None:
        """Count a read; `tier` None: the block was nowhere."""
        for counts in (self.total, self.of(namespace)):
            if tier is None:
                counts.misses += 1
            else:
                counts.tiers[tier].hits += 1

    def count(self, changes: Sequence[Change]) -> None:
        """Count changes; called before anything that they speak of is carried out."""
        for change in changes:
            for counts in (self.total, self.of(change.entry.namespace)):
                match change:
                    case Stored(entry, tier):
                        _come(counts.tiers[tier], entry, tier)
                    case Moved(entry, source, target):
                        _come(counts.tiers[target], entry, target)
                        if _SPEED[target] < _SPEED[source]:
                            counts.tiers[target].promotions += 1
                        else:
                            counts.tiers[target].demotions += 1
                    case Left(entry, tier, reason):
                        counts.tiers[tier].blocks -= 1
                        counts.tiers[tier].bytes -= _nbytes(entry, tier)
                        counts.tiers[tier].dropped[reason] += 1
            if isinstance(change, Left):
                self._metrics.dropped.labels(change.tier, change.reason).inc()


def _come(counts: TierCounts, entry: Entry, tier: Tier) -> None:
    counts.blocks += 1
    counts.bytes += _nbytes(entry, tier)


def _nbytes(entry: Entry, tier: Tier) -> int:
    copy = entry.at(tier)
    assert copy is not None, "what comes or goes is there"
    return copy.nbytes
