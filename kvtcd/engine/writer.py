"""Group commit: many small writes of one tenant become few transactions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvtcd.core.errors import KvtcdError, StoreFailed, StoreFull
from kvtcd.core.keys import RecordKey
from kvtcd.engine.lanes import Lane
from kvtcd.engine.ports import Environment
from kvtcd.engine.streams import Watch

MAX_RECORDS = 8
MAX_BYTES = 32 << 20
LINGER = 0.005
"""Seconds that a write waits for company: the price of a commit is a disk flush, paid once for all."""
DROP_ATTEMPTS = 3

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    put: object | None
    drop: RecordKey | None
    nbytes: int
    watch: Watch | None
    done: asyncio.Future[None]


class Writer:
    """The one writer of an environment: a task that gathers, and a lane that commits.

    Args:
        environment: written by this lane alone.
        lane: one thread.

    Attributes:
        name: that of the lane.
        pending: 1 while records are committed. Calls of `exclusive` do not count: a rewrite may take long.
        ended: commits that have ended.
    """

    def __init__(self, environment: Environment, lane: Lane) -> None:
        self.environment = environment
        self.name, self.pending, self.ended = lane.name, 0, 0
        self._lane = lane
        self._queue: asyncio.Queue[_Write | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._gather(), name=f"kvtcd-writer-{lane.name}")

    @property
    def depth(self) -> int:
        """Writes that wait; bounded by the moves the catalog lets run, plus drops."""
        return self._queue.qsize()

    async def put(self, record: object, nbytes: int, watch: Watch | None = None) -> None:
        """Store a record; return once its transaction, which `watch` is told of, is committed.

        Raises:
            StoreFailed: nothing was stored.
        """
        await self._submit(record, None, nbytes, watch)

    async def drop(self, key: RecordKey) -> None:
        """Remove a record; return once its transaction is committed.

        Raises:
            StoreFailed: it is still there, after a few attempts.
        """
        await self._submit(None, key, 0, None)

    async def exclusive(self, call: Callable[[Environment], T]) -> T:
        """Run a call on the writing thread, after what was committed before it."""
        return await self._lane.run(call, self.environment)

    async def close(self) -> None:
        """Commit what waits, close the environment, end the thread."""
        self._queue.put_nowait(None)
        await self._task
        await self._lane.run(self.environment.close)
        await self._lane.close()

    async def _submit(
        self, put: object | None, drop: RecordKey | None, nbytes: int, watch: Watch | None
    ) -> None:
        done = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Write(put, drop, nbytes, watch, done))
        await done

    async def _gather(self) -> None:
        late: _Write | None = None
        while (first := late or await self._queue.get()) is not None:
            late, group, nbytes = None, [first], first.nbytes
            deadline = asyncio.get_running_loop().time() + LINGER
            while len(group) < MAX_RECORDS and nbytes < MAX_BYTES:
                try:
                    async with asyncio.timeout_at(deadline):
                        write = await self._queue.get()
                except TimeoutError:
                    break
                if write is None:
                    self._queue.put_nowait(None)  # the end, seen again in the next turn
                    break
                if nbytes + write.nbytes > MAX_BYTES:
                    late = write
                    break
                group.append(write)
                nbytes += write.nbytes
            await self._commit(group)

    async def _commit(self, group: list[_Write]) -> None:
        puts = [write.put for write in group if write.put is not None]
        drops = [write.drop for write in group if write.drop is not None]
        watches = [write.watch for write in group if write.watch is not None]
        try:
            await self._lane.run(self._write, puts, drops, watches)
        except Exception as fault:  # noqa: BLE001 - whatever it is, those who wait are told, and others can write
            error = _told(fault)
            full = "; the disk tier holds less until there is room" if isinstance(error, StoreFull) else ""
            _log.warning(
                "%s: %s: %d records were not written and stay where they were; %d removals are tried again%s",
                self.name, error, len(puts), len(drops), full,
            )  # fmt: skip
            _settle([write for write in group if write.put is not None], error)
            await self._drop_alone([write for write in group if write.drop is not None])
        else:
            _settle(group, None)

    def _write(self, puts: list[object], drops: list[RecordKey], watches: list[Watch]) -> None:
        begin = time.perf_counter()
        self.pending = 1
        try:
            self.environment.write(puts, drops)
        finally:
            self.pending, self.ended = 0, self.ended + 1
            end = time.perf_counter()
            for watch in watches:
                watch(begin, end)

    async def _drop_alone(self, group: list[_Write]) -> None:
        """Drops are what makes room again, so they get a transaction of their own, and a second chance."""
        if not group:
            return
        for attempt in range(DROP_ATTEMPTS):
            try:
                await self._lane.run(
                    self.environment.write, [], [w.drop for w in group if w.drop is not None]
                )
            except Exception as fault:  # noqa: BLE001 - as above
                if attempt == DROP_ATTEMPTS - 1:
                    _settle(group, _told(fault))
                    return
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                _settle(group, None)
                return


def _told(fault: Exception) -> KvtcdError:
    """Return what those are told who wait for a write that failed."""
    if isinstance(fault, KvtcdError):
        return fault
    _log.error("unexpected failure while writing", exc_info=fault)
    return StoreFailed("write", type(fault).__name__, str(fault))


def _settle(group: list[_Write], error: KvtcdError | None) -> None:
    for write in group:
        if write.done.done():
            continue  # whoever waited has gone
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)
