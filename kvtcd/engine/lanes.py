"""The only way off the event loop: named threads that run one call after the other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from kvtcd.engine.streams import Stage, Stages, Watch, came

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


class Lane:
    """One thread with a name, which runs calls in order: the `Stream` of a host without a GPU.

    Args:
        name: shown as ``kvtcd-<name>`` in thread listings.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"kvtcd-{name}")
        self._running: deque[None] = deque()  # appended and popped atomically by several threads
        self.ended = 0
        """Calls that have ended."""

    @property
    def pending(self) -> int:
        """Calls submitted and not yet ended."""
        return len(self._running)

    def submit(
        self,
        call: Callable[[T], U],
        after: Future[T],
        watch: Watch | None = None,
    ) -> Future[U]:
        """Queue a call of what `after` yields; see `Stream`."""
        return self._submit(_follow, call, after, watch)

    def release(self, event: Future[Any]) -> None:
        """Do nothing: what a thread yields may end on any other; see `Stream`."""

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call on this lane.

        Cancelling the caller does not stop the call: what it does to a tier ends as it would have.
        """
        event = self._submit(call, *args, **kwargs)
        await came(event)
        return event.result()

    async def close(self) -> None:
        """Wait for what was submitted, then end the thread."""
        await asyncio.to_thread(self._pool.shutdown)

    def _submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        self._running.append(None)
        future = self._pool.submit(call, *args, **kwargs)
        future.add_done_callback(self._end)
        return future

    def _end(self, _: Future[Any]) -> None:
        self._running.pop()
        self.ended += 1


def _follow(call: Callable[[T], U], after: Future[T], watch: Watch | None) -> U:
    value = after.result()
    if watch is None:
        return call(value)
    begin = time.perf_counter()
    try:
        return call(value)
    finally:
        watch(begin, time.perf_counter())


def on_threads(suffix: str = "") -> Stages:
    """Return the stages of codecs that work on the CPU.

    There is a thread for the disk, one for each half of the codec, either way; what takes no time beside its
    neighbour shares its neighbour's thread: changes of threads add to the latency of a single block.

    Args:
        suffix: of the threads' names.
    """
    inflate, synthesize = Lane("inflate" + suffix), Lane("synthesize" + suffix)
    analyze, deflate = Lane("analyze" + suffix), Lane("deflate" + suffix)
    return Stages(
        read=Stage("read", Lane("read" + suffix)),
        check=Stage("check", inflate),
        inflate=Stage("inflate", inflate),
        synthesize=Stage("synthesize", synthesize),
        scatter=Stage("scatter", synthesize),
        gather=Stage("gather", analyze),
        analyze=Stage("analyze", analyze),
        deflate=Stage("deflate", deflate),
        seal=Stage("seal", deflate),
    )
