"""How the daemon's sums were a while ago: samples of the last hour, the oldest forgotten first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvtcd.core.message import Answer
from kvtcd.core.messages import Count
from kvtcd.core.place import Place, Tier
from kvtcd.engine.tally import Counts

EVERY_S = 10.0
"""Seconds between two samples."""
SAMPLES = 360
"""That are kept: an hour."""


@dataclass(frozen=True, slots=True)
class TierSample(Answer):
    """One tier: copies that can be read and their bytes, and blocks read from it since the start."""

    blocks: Count
    bytes: Count
    hits: Count


@dataclass(frozen=True, slots=True)
class Sample(Answer):
    """All tenants at one moment.

    Attributes:
        uptime_s: seconds since the start of the daemon.
        misses: reads of blocks that were nowhere, since then.
        fetched: reads for which a block came from the shared store, since then.
        tiers: by name.
    """

    uptime_s: float
    misses: Count
    fetched: Count
    tiers: dict[str, TierSample]

    @classmethod
    def of(cls, uptime_s: float, counts: Counts, tiers: Iterable[Tier]) -> Sample:
        """Return the sums over both forms of each tier."""
        sums = {str(tier): _sums(counts, tier) for tier in tiers}
        return cls(uptime_s, counts.misses, counts.fetched, sums)


@dataclass(frozen=True, slots=True)
class Samples(Answer):
    """The last samples, the oldest first, one every `every_s` seconds."""

    every_s: float
    samples: tuple[Sample, ...]


class History:
    """The last samples.

    Args:
        size: how many are kept.
    """

    def __init__(self, size: int = SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=size)

    def add(self, sample: Sample) -> None:
        """Keep one more."""
        self._samples.append(sample)

    @property
    def samples(self) -> Samples:
        """What was kept."""
        return Samples(EVERY_S, tuple(self._samples))


def _sums(counts: Counts, tier: Tier) -> TierSample:
    places = [counts.places[place] for place in Place if place.tier is tier]
    return TierSample(
        sum(place.blocks for place in places),
        sum(place.bytes for place in places),
        sum(place.hits for place in places),
    )
