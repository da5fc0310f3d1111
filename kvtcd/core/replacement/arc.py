"""Adaptive replacement: recency and frequency share the tier (Megiddo, Modha, FAST 2003)."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.replacement.ghosts import Ghosts
from kvtcd.core.replacement.seat import Block, Rings, Seat

_ONCE, _OFTEN = 0, 1
"""The rings T1 and T2 of the paper."""


class Arc(Rings):
    """ARC over bytes: T1 and T2 hold what was used once and more often; B1 and B2 remember what left them.

    Unlike in the paper, room is made before the newcomer is known: the target is adapted when it is there.

    Args:
        capacity: bytes of the tier.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(2)
        self._capacity = capacity
        self._target = 0.0
        self._ghosts = (Ghosts(), Ghosts())

    def insert(self, seat: Seat) -> None:
        """Take in a copy: into T2 if a ghost remembers it, whose list then gets more room."""
        key, size = seat.block.key, seat.nbytes
        once, often = self._ghosts
        if key in once:
            self._target = min(self._capacity, self._target + size * max(1.0, often.nbytes / once.nbytes))
        elif key in often:
            self._target = max(0.0, self._target - size * max(1.0, once.nbytes / often.nbytes))
        self._place(seat, _OFTEN if key in once or key in often else _ONCE)
        once.forget(key)
        often.forget(key)
        self._trim()

    def use(self, seat: Seat) -> None:
        """Move a copy to the young end of T2."""
        self._place(seat, _OFTEN)

    def renew(self, seat: Seat) -> None:
        """Move a copy to the young end of its list."""
        assert seat.rank is not None, "a seat of this order"
        self._place(seat, seat.rank)

    def discard(self, seat: Seat) -> None:
        """Forget a copy, but for its ghost."""
        assert seat.rank is not None, "a seat of this order"
        ghosts = self._ghosts[seat.rank]
        super().discard(seat)
        ghosts.add(seat)
        self._trim()

    def _trim(self) -> None:
        """Keep |T1| + |B1| within the capacity, and all four lists within twice of it."""
        once, often = self._ghosts
        first, second = (ring.nbytes for ring in self._rings)
        once.trim(self._capacity - first)
        often.trim(2 * self._capacity - first - second - once.nbytes)

    def coldest(self) -> Iterator[Seat]:
        """Yield from T1 while it is over its target, else from T2."""
        once, often = self._rings
        first, second, over = once.oldest, often.oldest, once.nbytes - self._target
        while first is not None or second is not None:
            if first is not None and (over > 0 or second is None):
                seat, over = first, over - first.nbytes
                first = once.following(seat)
                yield seat
            elif second is not None:
                seat, second = second, often.following(second)
                yield seat

    def admits(self, block: Block) -> bool:  # noqa: ARG002 - T1 is for newcomers
        """Every newcomer is worth it."""
        return True
