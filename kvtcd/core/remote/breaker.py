"""When a store that fails is asked again: a circuit breaker, and pauses between attempts."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

FAILURES = 5
"""Calls that fail in a row until the store is left alone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class BreakerState(StrEnum):
    """What a breaker lets through: everything, nothing, or one call that finds out."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


def pause(attempt: int, first: float, longest: float, luck: Callable[[], float]) -> float:
    """Return the seconds until the next attempt: between half and all of a time that doubles each time.

    Args:
        attempt: those that have failed, from 1.
        first: seconds after the first of them, at most.
        longest: seconds at most.
        luck: returns a number of [0, 1), so that many who failed together do not come back together.
    """
    return min(longest, first * 2.0 ** min(attempt - 1, 32)) * (0.5 + 0.5 * luck())


class Breaker:
    """Leaves a store alone that fails several times in a row, and has one call find out when it is back.

    Who was let through says how it went, once.

    Args:
        clock: seconds; must not go back.
        luck: see `pause`.

    Attributes:
        opened: how often the store was left alone.
        answered: calls that went well.
    """

    def __init__(self, clock: Callable[[], float], luck: Callable[[], float]) -> None:
        self._clock, self._luck = clock, luck
        self._failures = self._pauses = 0
        self._until = 0.0
        self._probing = False
        self.opened = self.answered = 0

    def fellow(self) -> Breaker:
        """Return another one, closed, with the same clock and luck."""
        return Breaker(self._clock, self._luck)

    @property
    def state(self) -> BreakerState:
        """What it lets through now."""
        if self._failures < FAILURES:
            return BreakerState.CLOSED
        return BreakerState.PROBING if self._probing or self.wait <= 0 else BreakerState.OPEN

    @property
    def failing(self) -> int:
        """Calls in a row, up to the last one, that went wrong."""
        return self._failures

    @property
    def wait(self) -> float:
        """Seconds until a call may be let through; 0: now, unless one is finding out."""
        return 0.0 if self._failures < FAILURES else max(0.0, self._until - self._clock())

    def admits(self) -> bool:
        """Tell whether a call may be made; who is told yes has to say how it went."""
        if self._failures < FAILURES:
            return True
        if self._probing or self.wait > 0:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The store has answered."""
        self.answered += 1
        self._failures = self._pauses = 0
        self._probing = False

    def failed(self) -> None:
        """The store has not answered, or not in time."""
        closed = self._failures < FAILURES
        self._failures += 1
        if self._failures < FAILURES or not (closed or self._probing):
            return  # of calls that were under way when it opened, none makes the pause longer
        self._probing = False
        self._pauses += 1
        self.opened += closed
        self._until = self._clock() + pause(self._pauses, FIRST_PAUSE_S, LONGEST_PAUSE_S, self._luck)

    def withdrawn(self) -> None:
        """Who was let through has gone without an answer: that says nothing of the store."""
        self._probing = False
