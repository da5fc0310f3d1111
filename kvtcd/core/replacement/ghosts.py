"""Keys of blocks that were here: what a policy remembers of its victims."""

from __future__ import annotations

from collections import OrderedDict

from kvtcd.core.keys import RecordKey
from kvtcd.core.replacement.seat import Seat


class Ghosts:
    """Keys in the order of their going, with the bytes they had.

    Attributes:
        nbytes: sum over all.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[RecordKey, int] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, key: RecordKey) -> bool:
        return key in self._sizes

    def add(self, seat: Seat) -> None:
        """Remember a copy that goes."""
        self.forget(seat.block.key)
        self._sizes[seat.block.key] = seat.nbytes
        self.nbytes += seat.nbytes

    def forget(self, key: RecordKey) -> None:
        """Forget a key; an unknown one is ignored."""
        self.nbytes -= self._sizes.pop(key, 0)

    def trim(self, nbytes: int) -> None:
        """Forget those that went first until at most `nbytes` are left."""
        while self._sizes and self.nbytes > nbytes:
            self.nbytes -= self._sizes.popitem(last=False)[1]
