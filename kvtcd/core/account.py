"""A bound on bytes: of a tier, of a tenant in it, of a namespace in it."""

from __future__ import annotations

KEPT = 0.9
"""Share of what a full device holds that stays, so that there is room to go on within its file."""
PAUSE = 10
"""Seconds after a device was full in which it is given time to free what is being dropped."""
REST = 600
"""Seconds after which a little more is tried again."""


class Account:
    """What is used of so many bytes, and what is about to be free.

    Attributes:
        meant: bytes that it is to have.
        capacity: bytes that it has: fewer while a device holds no more.
        high: bytes above which copies are moved out ahead of need.
        low: bytes down to which they are.
        used: bytes of all copies, those that are filling and those that are going included.
        leaving: bytes of copies that leave once they have been moved, and those reserved for what becomes of
            them in the same tier: how few that will be is known only in the end.
        dropping: bytes of copies that are just being dropped.
        easing: copies are moved out until the low mark is reached.
        namespaces: numbers of those whose copies are booked here.
    """

    __slots__ = (
        "_full_at", "_marks", "_tried_at", "capacity", "dropping", "easing", "high", "leaving", "low",
        "meant", "namespaces", "used",
    )  # fmt: skip

    def __init__(self, capacity: int, high: float, low: float) -> None:
        self.namespaces: set[int] = set()
        self.used = self.leaving = self.dropping = 0
        self.easing = False
        self._full_at: int | None = None
        """When the device was full the last time; None: it holds what is meant."""
        self._tried_at = 0
        """When a little more was tried the last time."""
        self.limit(capacity, high, low)

    def limit(self, capacity: int, high: float, low: float) -> None:
        """Set the bound; the marks are shares of it."""
        self.meant, self._marks = capacity, (high, low)
        self._bind(capacity if self._full_at is None else min(capacity, self.capacity))

    def _bind(self, capacity: int) -> None:
        self.capacity = capacity
        self.high, self.low = (int(capacity * mark) for mark in self._marks)

    def run_short(self, held: int, need: int, now: int) -> bool:
        """Keep a tenth less than the `held` bytes of a full device; tell whether that makes, or made, room.

        A device that is full of other things, so that a tenth is less than the `need`, is left to its owner.
        """
        if self._full_at is None or now - self._full_at >= PAUSE:
            kept = int(held * KEPT)
            if held - kept < need:
                return False
            self._full_at = self._tried_at = now
            self._bind(min(self.capacity, int(kept / max(self._marks[1], KEPT))))  # the low mark is `kept`
        return True

    def try_more(self, now: int) -> None:
        """After a while, see whether the device holds a little more."""
        if self._full_at is not None and now - self._tried_at >= REST:
            self._tried_at = now
            self._bind(min(self.meant, self.capacity + self.capacity // 32 + self.meant // 256 + 1))
            if self.capacity == self.meant:
                self._full_at = None

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
