"""A thread that does one thing after the other for an engine that never waits, and keeps what came of it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _Task(Generic[R]):
    number: int
    work: Callable[[], R]
    otherwise: R


_Work = Callable[[], None]


class Lane(Generic[R]):
    """Tasks in order, one thread. Every task ends exactly once, with a result; any thread may ask for it.

    Args:
        name: of the thread.
        log: where a task that fails is written to.
        done: called after each task, by the lane's thread.
    """

    def __init__(self, name: str, log: logging.Logger, done: Callable[[], None]) -> None:
        self._log, self._done = log, done
        self._waiting: queue.SimpleQueue[_Task[R] | _Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._results: dict[int, R] = {}
        self._count = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], R], otherwise: R) -> int:
        """Have something done; return the number of the task.

        Args:
            work: returns the result.
            otherwise: the result if it raises, or if the lane is closed before.
        """
        with self._lock:
            number, self._count = self._count, self._count + 1
            if not self._closed:
                self._waiting.put(_Task(number, work, otherwise))
                return number
        self._end(number, otherwise)
        return number

    def do(self, work: _Work) -> None:
        """Have something done of which nobody asks what came; not at all if the lane is closed before."""
        self._waiting.put(work)

    def take(self, number: int) -> R | None:
        """Return the result of a task that has ended, once."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, R]:
        """Return the results that were not taken yet, by the numbers of their tasks."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Let what runs end, end what waits, and stop the thread."""
        with self._lock:
            self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            if isinstance(task, _Task):
                result = self._attempt(task.work)
                self._end(task.number, task.otherwise if result is None else result)
            else:
                self._attempt(task)

    def _attempt(self, work: Callable[[], S]) -> S | None:
        try:
            return None if self._closed else work()
        except Exception:  # noqa: BLE001 - the engine lives on whatever is wrong here; the log has it
            self._log.exception("kvtcd: a task failed")
            return None

    def _end(self, number: int, result: R) -> None:
        with self._lock:
            self._results[number] = result
        self._done()
