"""Greedy dual size frequency: what is cheap to compute again and large goes first (Cherkasova 1998)."""

from __future__ import annotations

from kvtcd.core.replacement.graded import STEPS, Graded
from kvtcd.core.replacement.seat import Block, Seat
from kvtcd.core.sightings import Sightings

_EQUAL_AT = 32_768
"""Position from which on attention costs more than the rest of the model, in tokens, for common sizes."""
_LEAST = -40
"""Tokens of prefill per byte, as a power of two, from which on blocks are told apart."""
_GAINS = [2 ** (_LEAST + rank / STEPS) for rank in range(256)]


class Gdsf(Graded):
    """Priority = clock when used + uses · cost / bytes; the clock is the priority of the last victim.

    The cost of a block is that of its prefill: its tokens, each of which attends to all before it. The gain,
    uses · cost / bytes, is rounded to a quarter of a doubling, so that an order needs no table.

    Args:
        sightings: told of every use before this order is.
    """

    def __init__(self, sightings: Sightings) -> None:
        super().__init__(len(_GAINS), _LEAST)
        self._sightings = sightings
        self._clock = 0.0

    def insert(self, seat: Seat) -> None:
        """Take in a copy, or note a use of one."""
        seat.stamp = self._clock
        block = seat.block
        cost = block.tokens * (1 + block.position / _EQUAL_AT)
        self._place(seat, self._rank(max(self._sightings.count(block.key), 1.0) * cost / seat.nbytes))

    use = insert

    def renew(self, seat: Seat) -> None:
        """Make a copy the youngest of its gain."""
        seat.stamp = self._clock
        assert seat.rank is not None, "a seat of this order"
        self._place(seat, seat.rank)

    def discard(self, seat: Seat) -> None:
        """Forget a copy; the clock moves on to its priority, but never beyond one that stays."""
        priority = self._worth(seat)
        super().discard(seat)
        if priority > self._clock:
            least = min((worth for worth, _, _ in self._heads()), default=priority)
            self._clock = max(self._clock, min(priority, least))

    def admits(self, block: Block) -> bool:  # noqa: ARG002 - the clock is what newcomers have in common
        """Every newcomer is worth it."""
        return True

    def _worth(self, seat: Seat) -> float:
        """Return the priority."""
        assert seat.rank is not None, "a seat of this order"
        return seat.stamp + _GAINS[seat.rank]
