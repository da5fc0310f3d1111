"""What waits to be written to a store: a queue that is bounded in bytes, and takes nothing more when full.

What came first is kept, since blocks of a prefix come in order, and the later ones are of no use without the
earlier. What could not be written waits for as long as it takes: only what the store refuses on its own
account, while it takes other things, is given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """Something that waits.

    Attributes:
        refused: how often it was refused on its own account.
        failed: how much had been settled when it failed last; None: it has not.
    """

    name: str
    nbytes: int
    item: T
    refused: int = 0
    failed: int | None = None


class Backlog(Generic[T]):
    """First in, first out. What is taken counts until it is `settled` or stands aside by `again`.

    Who took something may be late: it was forgotten meanwhile, and what has its name now is with another.
    So what is taken is known by itself, not by its name.

    Args:
        capacity: bytes.
        attempts: how often one item may be refused on its own account.

    Attributes:
        nbytes: of all that waits or is being written.
    """

    def __init__(self, capacity: int, *, attempts: int) -> None:
        self._capacity, self._attempts = capacity, attempts
        self._waiting: OrderedDict[str, Waiting[T]] = OrderedDict()
        self._taken: dict[str, Waiting[T]] = {}
        self._aside: dict[str, Waiting[T]] = {}
        self._settled = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken) + len(self._aside)

    @property
    def waiting(self) -> int:
        """Items that nobody has taken."""
        return len(self._waiting)

    def offer(self, name: str, nbytes: int, item: T) -> Offer:
        """Let something wait, if there is room."""
        if name in self._waiting or name in self._taken or name in self._aside:
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
        return self._taken.get(one.name) is one

    def settled(self, one: Waiting[T]) -> bool:
        """Something that was taken is written, or is not to be; tell whether it was still wanted."""
        wanted = self._left(one)
        self._settled += wanted
        return wanted

    def alone(self, one: Waiting[T]) -> bool:
        """Tell whether others were settled since something failed last: failing again is its own doing."""
        return one.failed is not None and one.failed < self._settled

    def again(self, one: Waiting[T], *, own: bool) -> bool:
        """Something that was taken could not be written: let it stand aside until `resume`.

        Args:
            one: what was taken.
            own: it was refused on its own account.

        Returns:
            False: it is given up.
        """
        refused = one.refused + own
        if refused >= self._attempts or not self.wants(one):
            self._left(one)
            return False
        del self._taken[one.name]
        self._aside[one.name] = replace(one, refused=refused, failed=self._settled)
        return True

    def _left(self, one: Waiting[T]) -> bool:
        wanted = self.wants(one)
        if wanted:
            del self._taken[one.name]
            self.nbytes -= one.nbytes
        return wanted

    @property
    def aside(self) -> int:
        """Items that stand aside."""
        return len(self._aside)

    def resume(self) -> None:
        """Let all that stands aside wait in front, in the order in which it got there."""
        for one in reversed(self._aside.values()):
            self._waiting[one.name] = one
            self._waiting.move_to_end(one.name, last=False)
        self._aside.clear()

    def discard(self, doomed: Callable[[str], bool]) -> int:
        """Forget what has such names, taken or not; return how many there were."""
        names = [name for name in (*self._waiting, *self._taken, *self._aside) if doomed(name)]
        for name in names:
            one = self._waiting.pop(name, None) or self._taken.pop(name, None) or self._aside.pop(name)
            self.nbytes -= one.nbytes
        return len(names)
