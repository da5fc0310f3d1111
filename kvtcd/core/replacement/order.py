"""What a tier asks of a replacement policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvtcd.core.replacement.seat import Block, Seat


class Replacement(Protocol):
    """Order of the READY copies of one tier: who goes first. It never moves anything.

    Every operation takes constant or logarithmic time, amortised. One request uses a block once: by its
    `insert`, or by `use`.
    """

    def insert(self, seat: Seat) -> None:
        """Take in a copy."""

    def use(self, seat: Seat) -> None:
        """Note one use of a copy; one that is held is named again."""

    def renew(self, seat: Seat) -> None:
        """Make a copy the youngest of its like without counting a use; one that is held is named again."""

    def discard(self, seat: Seat) -> None:
        """Forget a copy, held or not. A policy with a memory remembers that it was here."""

    def hold(self, seat: Seat) -> None:
        """Name a copy no more until it is used, renewed or released."""

    def release(self, seat: Seat) -> None:
        """Name a held copy again, as if it had come to its turn."""

    def coldest(self) -> Iterator[Seat]:
        """Yield copies, first victim first.

        While iterating, only the copy just yielded may be held; nothing else may change. Asking may age the
        order: do it for victims only.
        """

    def admits(self, block: Block) -> bool:
        """Tell whether a newcomer, for whom another must go, is worth it."""
