"""Simple, scalable FIFO queues: most newcomers leave by a small queue (Yang et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.replacement.ghosts import Ghosts
from kvtcd.core.replacement.seat import Block, Rings, Seat

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MOST = 3
"""Uses beyond this are not counted."""


class S3Fifo(Rings):
    """S3-FIFO over bytes. The stamp of a seat counts its uses since it last moved, up to three.

    What leaves the small queue unused is remembered as long as the main queue is large; coming back, it
    enters the main queue.

    Args:
        capacity: bytes of the tier.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(2)
        self._small = int(capacity * _SMALL_SHARE)
        self._ghosts, self._ghost_bytes = Ghosts(), capacity - self._small

    def insert(self, seat: Seat) -> None:
        """Take in a copy: into the main queue if it was here not long ago."""
        key = seat.block.key
        seat.stamp = 0
        self._place(seat, _MAIN if key in self._ghosts else _SMALL)
        self._ghosts.forget(key)

    def use(self, seat: Seat) -> None:
        """Count a use; the queues stay as they are."""
        seat.stamp = min(seat.stamp + 1, _MOST)
        self.renew(seat)

    def renew(self, seat: Seat) -> None:
        """Name a held copy again; in a queue, nothing moves."""
        if seat.older is None:
            self.release(seat)

    def discard(self, seat: Seat) -> None:
        """Forget a copy; one from the small queue leaves a ghost."""
        small = seat.rank == _SMALL
        super().discard(seat)
        if small:
            self._ghosts.add(seat)
            self._ghosts.trim(self._ghost_bytes)

    def coldest(self) -> Iterator[Seat]:
        """Yield what comes to its turn unused; what was used moves to, or back in, the main queue."""
        small, main = self._rings
        first, second, left = small.oldest, main.oldest, small.nbytes
        while first is not None or second is not None:
            if first is not None and (left >= self._small or second is None):
                seat, left = first, left - first.nbytes
                first = small.following(seat)
                if seat.stamp > 1:
                    seat.stamp = 0
                    self._place(seat, _MAIN)
                    second = second or seat
                else:
                    yield seat
            elif second is not None:
                seat = second
                if seat.stamp:
                    seat.stamp -= 1
                    second = main.following(seat) or seat
                    self._place(seat, _MAIN)
                else:
                    second = main.following(seat)
                    yield seat

    def admits(self, block: Block) -> bool:  # noqa: ARG002 - the small queue is for newcomers
        """Every newcomer is worth it."""
        return True
