"""Rings of equal worth: what policies have in common that weigh blocks."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import log2

from kvtcd.core.replacement.seat import Rings, Seat

STEPS = 4
"""Rings per doubling of worth."""


class Graded(Rings, ABC):
    """One ring for each quarter of a doubling of what a copy is worth when it is used.

    All seats of a ring age alike, so the least worthy of all is the oldest of some ring.

    Args:
        count: of rings.
        least: the worth of the first ring, as a power of two.
    """

    def __init__(self, count: int, least: int) -> None:
        super().__init__(count)
        self._first, self._last = count - 1, 0
        self._least = least

    def _rank(self, worth: float) -> int:
        """Return the ring for a worth; the outermost take what is beyond."""
        rank, last = round(STEPS * (log2(worth) - self._least)), len(self._rings) - 1
        return 0 if rank < 0 else min(rank, last)

    def _place(self, seat: Seat, rank: int) -> None:
        """Make a seat the youngest of a ring."""
        if not self._first <= rank <= self._last:
            self._first, self._last = min(self._first, rank), max(self._last, rank)
        super()._place(seat, rank)

    @abstractmethod
    def _worth(self, seat: Seat) -> float:
        """Return what a seat is worth now; within a ring, no seat is worth less than an older one."""

    def _heads(self) -> list[tuple[float, int, Seat]]:
        """Return worth, ring and seat of the oldest of each ring."""
        rings = enumerate(self._rings[self._first : self._last + 1], self._first)
        return [(self._worth(head), rank, head) for rank, ring in rings if (head := ring.oldest)]

    def coldest(self) -> Iterator[Seat]:
        """Yield the least worthy first: a merge of the rings."""
        heads = self._heads()
        heapq.heapify(heads)
        while heads:
            _, rank, seat = heads[0]
            following = self._rings[rank].following(seat)
            yield seat
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self._worth(following), rank, following))
