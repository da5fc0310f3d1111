"""A bound on bytes: of a tier, of a tenant in it, of a namespace in it."""

from __future__ import annotations


class Account:
    """What is used of so many bytes, and what is about to be free.

    Attributes:
        capacity: bytes.
        high: bytes above which copies are moved out ahead of need.
        low: bytes down to which they are.
        used: bytes of all copies, those that are filling and those that are going included.
        leaving: bytes of copies that leave once they have been moved, and those reserved for what becomes of
            them in the same tier: how few that will be is known only in the end.
        dropping: bytes of copies that are just being dropped.
        easing: copies are moved out until the low mark is reached.
        namespaces: numbers of those whose copies are booked here.
    """

    __slots__ = ("capacity", "dropping", "easing", "high", "leaving", "low", "namespaces", "used")

    def __init__(self, capacity: int, high: float, low: float) -> None:
        self.namespaces: set[int] = set()
        self.used = self.leaving = self.dropping = 0
        self.easing = False
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

    def full(self, need: int) -> bool:
        """Tell whether `need` more bytes are above the high mark."""
        return self.staying + need > self.high

    def excess(self, need: int) -> int:
        """Return the bytes to move out for `need` more: from above the high mark down to the low one."""
        return max(0, self.staying + need - self.low) if self.easing or self.full(need) else 0

    def shortfall(self, need: int) -> int:
        """Return the bytes to move out so that `need` more just fit, once all that leaves has left."""
        return max(0, self.staying + need - self.capacity)

    def shortage(self, need: int) -> int:
        """Return the bytes to drop so that `need` more fit without waiting for a move."""
        return max(0, self.used - self.dropping + need - self.capacity)
