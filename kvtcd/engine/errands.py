"""Work in the background: ended whether or not somebody waits for it, and logged and counted if it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from kvtcd.core.errors import KvtcdError
from kvtcd.engine.metrics import Metrics

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Errands:
    """Tasks of the daemon's own. All methods belong to the loop.

    Args:
        metrics: told of those that fail, by name.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, name: str, work: Coroutine[Any, Any, T], *, expected: tuple[type[Exception], ...] = ()
    ) -> asyncio.Task[T]:
        """Begin some work; a failure is logged, and counted under its name unless it is `expected`."""
        task = asyncio.create_task(work, name=f"kvtcd-{name}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, expected=expected))
        return task

    async def finish(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Do some work to its end, also when whoever asked for it has gone, and return what it does.

        Its errors on purpose are his to handle.
        """
        return await asyncio.shield(self.start(name, work, expected=(KvtcdError,)))

    async def ended(self) -> None:
        """Return when nothing is under way any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any], *, expected: tuple[type[Exception], ...]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        name = task.get_name().removeprefix("kvtcd-")
        if isinstance(error, expected):
            _log.warning("%s was not completed: %s", name, error)
        elif error is not None:
            self._metrics.internal_errors.labels(name).inc()
            _log.error("unexpected failure of %s", name, exc_info=error)
