"""A bound on bytes: of a tier, of a tenant in it, of a namespace in it."""

from __future__ import annotations


class Account:
    """What is used of so many bytes, and what is about to be free.

    Attributes:
        capacity: bytes.
        high: bytes above which copies are moved out ahead of need.
        low: bytes down to which they are.
        used: bytes of all copies, those that are filling and those that are going included.
        leaving: bytes of copies that leave once they have been moved.
        dropping: bytes of copies that are just being dropped.
        namespaces: numbers of those whose copies are booked here.
    """

    __slots__ = ("capacity", "dropping", "high", "leaving", "low", "namespaces", "used")

    def __init__(self, capacity: int, high: float, low: float) -> None:
        self.namespaces: set[int] = set()
        self.used = self.leaving = self.dropping = 0
        self.limit(capacity, high, low)

    def limit(self, capacity: int, high: float, low: float) -> None:
        """Set the bound; the marks are shares of it."""
        self.capacity = capacity
        self.high, self.low = int(capacity * high), int(capacity * low)

    def fits(self, nbytes: int) -> bool:
        """Tell whether a footprint of `nbytes` can be reserved now."""
        return self.used + nbytes <= self.capacity

    @property
    def staying(self) -> int:
        """Bytes of copies that are not on their way out."""
        return self.used - self.leaving - self.dropping

    def excess(self, need: int) -> int:
        """Return the bytes to move out so that `need` more find room; 0 below the high mark."""
        projected = self.staying + need
        return projected - self.low if projected > self.high else 0

    def shortfall(self, need: int) -> int:
        """Return the bytes to move out so that `need` more just fit, once all that leaves has left."""
        return max(0, self.staying + need - self.capacity)

    def shortage(self, need: int) -> int:
        """Return the bytes to drop so that `need` more fit without waiting for a move."""
        return max(0, self.used - self.dropping + need - self.capacity)
