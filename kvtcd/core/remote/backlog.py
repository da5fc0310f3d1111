"""What waits to be written to a store: a queue that is bounded in bytes, and drops what does not fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class Offer(StrEnum):
    """What became of something that was offered to the queue."""

    TAKEN = "taken"
    KNOWN = "known"
    """It waits already, or is being written."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """Something that waits; `attempts` to write it have failed."""

    name: str
    nbytes: int
    item: T
    attempts: int = 0


class Backlog(Generic[T]):
    """First in, first out. What is taken counts until it is `settled` or comes back by `again`.

    Args:
        capacity: bytes.
        attempts: how often one item is tried.

    Attributes:
        nbytes: of all that waits or is being written.
    """

    def __init__(self, capacity: int, *, attempts: int) -> None:
        self._capacity, self._attempts = capacity, attempts
        self._waiting: OrderedDict[str, Waiting[T]] = OrderedDict()
        self._taken: dict[str, Waiting[T]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)

    @property
    def waiting(self) -> int:
        """Items that nobody has taken."""
        return len(self._waiting)

    def offer(self, name: str, nbytes: int, item: T) -> Offer:
        """Let something wait, if there is room; what came first is kept."""
        if name in self._waiting or name in self._taken:
            return Offer.KNOWN
        if self.nbytes + nbytes > self._capacity:
            return Offer.FULL
        self._waiting[name] = Waiting(name, nbytes, item)
        self.nbytes += nbytes
        return Offer.TAKEN

    def take(self, *, most: int, nbytes: int) -> list[Waiting[T]]:
        """Take the oldest: at most so many, and so many bytes, but one at least if there is one."""
        taken: list[Waiting[T]] = []
        size = 0
        while self._waiting and len(taken) < most:
            following = next(iter(self._waiting.values()))
            if taken and size + following.nbytes > nbytes:
                break
            del self._waiting[following.name]
            self._taken[following.name] = following
            taken.append(following)
            size += following.nbytes
        return taken

    def wants(self, one: Waiting[T]) -> bool:
        """Tell whether something that was taken is still to be written."""
        return one.name in self._taken

    def settled(self, one: Waiting[T]) -> bool:
        """Something that was taken is written, or is not to be; tell whether it was still wanted."""
        wanted = self._taken.pop(one.name, None) is not None
        self.nbytes -= wanted * one.nbytes
        return wanted

    def again(self, one: Waiting[T]) -> bool:
        """Something that was taken could not be written: let it wait in front; False: it is given up."""
        if one.attempts + 1 >= self._attempts or not self.wants(one):
            self.settled(one)
            return False
        del self._taken[one.name]
        self._waiting[one.name] = Waiting(one.name, one.nbytes, one.item, one.attempts + 1)
        self._waiting.move_to_end(one.name, last=False)
        return True

    def discard(self, doomed: Callable[[str], bool]) -> int:
        """Forget what has such names, taken or not; return how many there were."""
        names = [name for name in (*self._waiting, *self._taken) if doomed(name)]
        for name in names:
            one = self._waiting.pop(name, None) or self._taken.pop(name)
            self.nbytes -= one.nbytes
        return len(names)
