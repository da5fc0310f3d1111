"""Least frequently used first, with aging: what was used often, and not long ago, stays."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import log2

from kvtcd.core.replacement.seat import Block, Rings, Seat
from kvtcd.core.sightings import Sightings

_STEPS = 4
"""Rings per doubling of worth."""
_RINGS = 6 * _STEPS + 1
"""Up to 64 uses."""
_MARGIN = 0.25
"""A newcomer, surely not used again for a while, must be worth 2^0.25 times the one that goes for it."""


class Lfu(Rings):
    """The worth of a block is the number of uses seen lately, lessened by idle time.

    ::

        worth = uses · 2^-(idle / half_life)^2

    Uses are counted by `Sightings`, so a block that comes back is known again. Idle time first costs little
    (a person reads before answering), then more and more (a conversation that has ended does not come back).
    All blocks of a ring age alike, so the least worthy is the oldest of some ring, of which there is one per
    quarter of a doubling.

    Args:
        sightings: told of every use before this order is.
        half_life: idle seconds that halve the worth.
    """

    def __init__(self, sightings: Sightings, half_life: float) -> None:
        super().__init__(_RINGS)
        self._sightings, self._half_life = sightings, half_life

    def insert(self, seat: Seat) -> None:
        """Take in a copy, or note a use of one."""
        seat.stamp = self._sightings.now
        self._place(seat, self._rank(seat.block))

    use = insert

    def renew(self, seat: Seat) -> None:
        """Make a copy the youngest of its ring."""
        seat.stamp = self._sightings.now
        assert seat.rank is not None, "a seat of this order"
        self._place(seat, int(seat.rank))

    def coldest(self) -> Iterator[Seat]:
        """Yield the least worthy first: a merge of the rings."""
        heads = [
            (self._worth(head), rank, head) for rank, ring in enumerate(self._rings) if (head := ring.oldest)
        ]
        heapq.heapify(heads)
        while heads:
            _, rank, seat = heads[0]
            following = self._rings[rank].following(seat)
            yield seat
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self._worth(following), rank, following))

    def admits(self, block: Block) -> bool:
        """Tell whether a newcomer is clearly worth more than the least worthy."""
        worths = (self._worth(head) for ring in self._rings if (head := ring.oldest))
        return self._rank(block) / _STEPS >= min(worths, default=0.0) + _MARGIN

    def _rank(self, block: Block) -> int:
        uses = max(self._sightings.count(block.key), 1.0)
        return min(round(_STEPS * log2(uses)), _RINGS - 1)

    def _worth(self, seat: Seat) -> float:
        """Return the logarithm of the worth, to base 2."""
        assert seat.rank is not None, "a seat of this order"
        return seat.rank / _STEPS - ((self._sightings.now - seat.stamp) / self._half_life) ** 2
