"""Greedy dual size frequency: what is cheap to compute again and large goes first (Cherkasova 1998)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from kvtcd.core.replacement.seat import Block, Seat
from kvtcd.core.sightings import Sightings

_EQUAL_AT = 32_768
"""Position from which on attention costs more than the rest of the model, in tokens, for common sizes."""
_SLACK = 64


class Gdsf:
    """Priority = clock + uses · cost / bytes; the clock is the priority of the last victim.

    The cost of a block is that of its prefill: its tokens, each of which attends to all before it.

    Args:
        sightings: told of every use before this order is.
    """

    def __init__(self, sightings: Sightings) -> None:
        self._sightings = sightings
        self._clock = 0.0
        self._numbers = count(1)
        self._heap: list[tuple[float, int, Seat]] = []
        self._named = 0

    def insert(self, seat: Seat) -> None:
        """Take in a copy, or note a use of one."""
        self._unlist(seat)
        block = seat.block
        cost = block.tokens * (1 + block.position / _EQUAL_AT)
        seat.rank = self._clock + max(self._sightings.count(block.key), 1.0) * cost / seat.nbytes
        self._list(seat)

    use = insert

    def renew(self, seat: Seat) -> None:
        """Make a copy the youngest of its priority."""
        self._unlist(seat)
        self._list(seat)

    def discard(self, seat: Seat) -> None:
        """Forget a copy; the clock moves on to its priority, but never beyond one that stays."""
        assert seat.rank is not None, "a seat of this order"
        self._unlist(seat)
        while self._heap and not self._current(self._heap[0]):
            heapq.heappop(self._heap)
        least = min(seat.rank, self._heap[0][0]) if self._heap else seat.rank
        self._clock = max(self._clock, least)
        seat.rank = None

    def hold(self, seat: Seat) -> None:
        """Name a copy no more."""
        self._unlist(seat)

    def release(self, seat: Seat) -> None:
        """Name a held copy again."""
        self._list(seat)

    def coldest(self) -> Iterator[Seat]:
        """Yield in order of priority: a walk over the heap from its root that leaves it as it is."""
        heap = self._heap
        border = [(heap[0], 0)] if heap else []
        while border:
            entry, at = heapq.heappop(border)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(border, (heap[child], child))
            if self._current(entry):
                yield entry[2]

    def admits(self, block: Block) -> bool:  # noqa: ARG002 - the clock is what newcomers have in common
        """Every newcomer is worth it."""
        return True

    def _current(self, entry: tuple[float, int, Seat]) -> bool:
        return entry[2].stamp == entry[1]

    def _list(self, seat: Seat) -> None:
        assert seat.rank is not None, "a seat of this order"
        seat.stamp = next(self._numbers)
        heapq.heappush(self._heap, (seat.rank, seat.stamp, seat))
        self._named += 1
        if len(self._heap) > 2 * self._named + _SLACK:
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapq.heapify(self._heap)

    def _unlist(self, seat: Seat) -> None:
        """Leave a seat's entry in the heap behind; it is dropped when met."""
        self._named -= seat.stamp > 0
        seat.stamp = 0
