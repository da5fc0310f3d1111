"""What is known of a store without asking it: what was there, what was not, and until when it is believed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class _Seen(NamedTuple):
    there: bool
    until: float


class Presence:
    """A bounded memory of answers; those that were used or noted least lately are forgotten first.

    Args:
        clock: seconds; must not go back.
        present_s: how long something that was there is taken to be there.
        absent_s: how long something that was not is taken to be missing: another daemon may have stored it.
        capacity: names.
    """

    def __init__(
        self, clock: Callable[[], float], *, present_s: float, absent_s: float, capacity: int
    ) -> None:
        self._clock, self._capacity = clock, capacity
        self._present_s, self._absent_s = present_s, absent_s
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, name: str, *, there: bool) -> None:
        """Remember an answer of the store."""
        until = self._clock() + (self._present_s if there else self._absent_s)
        self._seen[name] = _Seen(there, until)
        self._seen.move_to_end(name)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def ask(self, name: str) -> bool | None:
        """Return whether something is there; None where that is not known, or not any more."""
        seen = self._seen.get(name)
        if seen is None:
            return None
        if seen.until <= self._clock():
            del self._seen[name]
            return None
        self._seen.move_to_end(name)
        return seen.there

    def forget(self, prefix: str) -> None:
        """Forget all names that begin so."""
        for name in [name for name in self._seen if name.startswith(prefix)]:
            del self._seen[name]
