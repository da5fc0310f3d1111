"""Least frequently used first, with aging: what was used often, and not long ago, stays."""

from __future__ import annotations

from math import inf

from kvtcd.core.replacement.graded import STEPS, Graded
from kvtcd.core.replacement.seat import Block, Seat
from kvtcd.core.sightings import Sightings

_DOUBLINGS = 6
"""Up to 64 uses are told apart."""
_TURN = 512
"""Tokens that are about one turn of a conversation: depths are told apart in doublings of it."""
_DEPTH = 1 / 16
"""Doublings of worth that a doubling of depth costs."""
_DEEPEST = 2
"""Doublings of worth that the greatest depth costs: 2^32 turns."""
_MARGIN = 0.25
"""A newcomer, surely not used again for a while, must be worth 2^0.25 times the one that goes for it."""


class Lfu(Graded):
    """The worth of a block is the number of uses seen lately, lessened by idle time.

    ::

        worth = uses · depth^(-1/16) · 2^-(idle / half_life)^2

    Uses are counted by `Sightings`, so a block that comes back is known again. Short prompts are taken up
    again more often than long ones (in the Mooncake conversations 37 of 100 blocks near the start are, 19
    beyond 64,000 tokens), so depth costs a little. Idle time first costs little (a person reads before
    answering), then more and more (a conversation that has ended does not come back).

    Args:
        sightings: told of every use before this order is.
        half_life: idle seconds that halve the worth.
    """

    def __init__(self, sightings: Sightings, half_life: float) -> None:
        super().__init__((_DEEPEST + _DOUBLINGS) * STEPS + 1, -_DEEPEST)
        self._sightings, self._half_life = sightings, half_life
        self._ranks: dict[tuple[float, int], int] = {}
        """Of the 255 counts that there are, at few depths each."""

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
        least = min((worth for worth, _, _ in self._heads()), default=-inf)
        return self._fresh(self._rank_of(block)) >= least + _MARGIN

    def _rank_of(self, block: Block) -> int:
        uses = max(self._sightings.count(block.key), 1.0)
        doublings = (1 + block.position // _TURN).bit_length()
        rank = self._ranks.get((uses, doublings))
        if rank is None:
            rank = self._ranks[uses, doublings] = self._rank(uses * 2 ** (-_DEPTH * doublings))
        return rank

    def _fresh(self, rank: int) -> float:
        """Return the logarithm of the worth at a use, to base 2."""
        return rank / STEPS - _DEEPEST

    def _worth(self, seat: Seat) -> float:
        """Return the logarithm of the worth, to base 2."""
        assert seat.rank is not None, "a seat of this order"
        return self._fresh(seat.rank) - ((self._sightings.now - seat.stamp) / self._half_life) ** 2
