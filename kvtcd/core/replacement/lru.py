"""Least recently used first."""

from __future__ import annotations

from collections.abc import Iterator

from kvtcd.core.replacement.seat import Block, Rings, Seat


class Lru(Rings):
    """One ring; whatever is used becomes its youngest."""

    def __init__(self) -> None:
        super().__init__(1)

    def insert(self, seat: Seat) -> None:
        """Take in a copy as the youngest."""
        self._place(seat, 0)

    use = renew = insert

    def coldest(self) -> Iterator[Seat]:
        """Yield from the least recently used on."""
        return iter(self._rings[0])

    def admits(self, block: Block) -> bool:  # noqa: ARG002 - what is new is younger than all
        """Every newcomer is worth it."""
        return True
