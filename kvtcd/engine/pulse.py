"""Whether work goes on: what a watchdog asks before it tells its master that all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

PATIENCE = 120.0
"""Seconds that one call of a worker may take: ten times what the largest block needs on one slow core."""


class Worker(Protocol):
    """Ends one call after the other, on a thread of its own."""

    @property
    def name(self) -> str:
        """What it is called in thread listings and metrics."""

    @property
    def pending(self) -> int:
        """Calls that it was given and that have not ended."""

    @property
    def ended(self) -> int:
        """Calls that have ended, ever."""


class Pulse:
    """Finds workers that have something to do and get nothing done.

    Args:
        workers: returns those who are to be watched at this moment.
    """

    def __init__(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self._workers = workers
        self._seen: dict[Worker, tuple[int, float]] = {}

    def stuck(self, now: float) -> str | None:
        """Return the name of a worker that has ended nothing for `PATIENCE`, though it had something to do.

        What is between two calls of this is not seen, so it is called several times in that span.

        Args:
            now: seconds of a clock that is never set back.
        """
        before, self._seen = self._seen, {}
        for worker in self._workers():
            if worker.pending:
                ended = worker.ended
                was, since = before.get(worker, (ended, now))
                self._seen[worker] = (ended, since if ended == was else now)
        late = [(since, worker.name) for worker, (_, since) in self._seen.items() if now - since >= PATIENCE]
        return min(late)[1] if late else None
