"""Least frequently used first, with aging: what was used often, and not long ago, stays."""

from __future__ import annotations

from kvtcd.core.replacement.graded import STEPS, Graded
from kvtcd.core.replacement.seat import Block, Seat
from kvtcd.core.sightings import Sightings

_DOUBLINGS = 6
"""Up to 64 uses are told apart."""
_MARGIN = 0.25
"""A newcomer, surely not used again for a while, must be worth 2^0.25 times the one that goes for it."""


class Lfu(Graded):
    """The worth of a block is the number of uses seen lately, lessened by idle time.

    ::

        worth = uses · 2^-(idle / half_life)^2

    Uses are counted by `Sightings`, so a block that comes back is known again. Idle time first costs little
    (a person reads before answering), then more and more (a conversation that has ended does not come back).

    Args:
        sightings: told of every use before this order is.
        half_life: idle seconds that halve the worth.
    """

    def __init__(self, sightings: Sightings, half_life: float) -> None:
        super().__init__(_DOUBLINGS * STEPS + 1, 0)
        self._sightings, self._half_life = sightings, half_life
        self._ranks: dict[float, int] = {}
        """Of the 255 counts that there are."""

    def insert(self, seat: Seat) -> None:
        """Take in a copy, or note a use of one."""
        seat.stamp = self._sightings.now
        self._place(seat, self._rank_of(seat.block))

    use = insert

    def renew(self, seat: Seat) -> None:
        """Make a copy the youngest of its ring."""
        seat.stamp = self._sightings.now
        assert seat.rank is not None, "a seat of this order"
        self._place(seat, seat.rank)

    def admits(self, block: Block) -> bool:
        """Tell whether a newcomer is clearly worth more than the least worthy."""
        least = min((worth for worth, _, _ in self._heads()), default=0.0)
        return self._rank_of(block) / STEPS >= least + _MARGIN

    def _rank_of(self, block: Block) -> int:
        uses = max(self._sightings.count(block.key), 1.0)
        rank = self._ranks.get(uses)
        return self._ranks.setdefault(uses, self._rank(uses)) if rank is None else rank

    def _worth(self, seat: Seat) -> float:
        """Return the logarithm of the worth, to base 2."""
        assert seat.rank is not None, "a seat of this order"
        return seat.rank / STEPS - ((self._sightings.now - seat.stamp) / self._half_life) ** 2
