"""The only way off the event loop: named threads that run one call after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """One thread, or a few that share a queue, with a name.

    Args:
        name: shown as ``kvtcd-<name>`` in thread listings.
        threads: more than one only for calls that need no order among them.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvtcd-{name}")
        self._running: deque[None] = deque()  # appended and popped atomically by several threads

    @property
    def pending(self) -> int:
        """Calls submitted and not yet ended."""
        return len(self._running)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call on this lane.

        Cancelling the caller does not stop the call: what it does to a tier ends as it would have.
        """
        self._running.append(None)
        future = self._pool.submit(call, *args, **kwargs)
        future.add_done_callback(lambda _: self._running.pop())
        return await asyncio.shield(asyncio.wrap_future(future))

    async def close(self) -> None:
        """Wait for what was submitted, then end the threads."""
        await asyncio.to_thread(self._pool.shutdown)
