"""Seats in an order, and rings of them: what every replacement policy is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from kvtcd.core.keys import RecordKey


class Block(Protocol):
    """What a policy may know of a block."""

    @property
    def key(self) -> RecordKey:
        """Its record key."""

    @property
    def tokens(self) -> int:
        """Tokens in it."""

    @property
    def position(self) -> int:
        """Tokens before it in its sequence."""


class Link:
    """A place in a ring; `older` and `younger` are None outside of one."""

    __slots__ = ("older", "younger")

    def __init__(self) -> None:
        self.older: Link | None = None
        self.younger: Link | None = None


class Seat(Link):
    """One copy of a block in the order of its tier. The links are in it, so an order costs no table.

    Attributes:
        block: what is copied.
        nbytes: what the copy is accounted with; constant while it sits.
        used: when it was last used, in the seconds of the catalog; the tier's own.
        rank: the policy's own; None outside of its order.
        stamp: the policy's own.
    """

    __slots__ = ("block", "nbytes", "rank", "stamp", "used")

    def __init__(self, block: Block, nbytes: int) -> None:
        self.older = self.younger = None  # as `Link` does, of which there may be a million
        self.block, self.nbytes = block, nbytes
        self.rank: int | None = None
        self.used = 0
        self.stamp: float = 0


class Ring:
    """Seats from the oldest to the youngest; every operation takes constant time.

    Attributes:
        nbytes: sum over its seats.
    """

    __slots__ = ("_end", "nbytes")

    def __init__(self) -> None:
        self._end = end = Link()
        end.older = end.younger = end
        self.nbytes = 0

    def append(self, seat: Seat) -> None:
        """Take in a seat as the youngest."""
        self._insert(seat, self._end)

    def prepend(self, seat: Seat) -> None:
        """Take in a seat as the oldest."""
        oldest = self._end.younger
        assert oldest is not None, "a ring is closed"
        self._insert(seat, oldest)

    def _insert(self, seat: Seat, younger: Link) -> None:
        older = younger.older
        assert older is not None, "one of the ring"
        seat.older, seat.younger = older, younger
        older.younger = younger.older = seat
        self.nbytes += seat.nbytes

    def remove(self, seat: Seat) -> None:
        """Take out a seat; one that is in no ring is ignored."""
        older, younger = seat.older, seat.younger
        if older is not None and younger is not None:
            older.younger, younger.older = younger, older
            seat.older = seat.younger = None
            self.nbytes -= seat.nbytes

    @property
    def oldest(self) -> Seat | None:
        """The oldest seat, None when empty."""
        return self._seat(self._end.younger)

    def following(self, seat: Seat) -> Seat | None:
        """Return the next younger seat, None after the youngest."""
        return self._seat(seat.younger)

    def _seat(self, link: Link | None) -> Seat | None:
        return None if link is self._end else cast("Seat", link)

    def __iter__(self) -> Iterator[Seat]:
        """Yield from the oldest on; the seat just yielded may be removed."""
        seat = self.oldest
        while seat is not None:
            following = self.following(seat)
            yield seat
            seat = following


class Rings:
    """An order made of rings: the rank of a seat is the number of its ring.

    A seat that is held keeps its rank, but is in no ring.

    Args:
        count: of rings.
    """

    def __init__(self, count: int) -> None:
        self._rings = [Ring() for _ in range(count)]

    def _ring(self, seat: Seat) -> Ring:
        assert seat.rank is not None, "a seat of this order"
        return self._rings[seat.rank]

    def _place(self, seat: Seat, rank: int) -> None:
        """Make a seat, new or held or listed, the youngest of a ring."""
        if seat.rank is not None:
            self._ring(seat).remove(seat)
        seat.rank = rank
        self._rings[rank].append(seat)

    def discard(self, seat: Seat) -> None:
        """Forget a copy."""
        self._ring(seat).remove(seat)
        seat.rank = None

    def hold(self, seat: Seat) -> None:
        """Name a copy no more."""
        self._ring(seat).remove(seat)

    def release(self, seat: Seat) -> None:
        """Name a held copy again, before all others of its ring."""
        self._ring(seat).prepend(seat)
