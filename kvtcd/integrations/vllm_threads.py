"""The threads that talk to the daemon for an engine: one for lookups, one for loads, one for stores.

The engine's thread only puts things on queues and takes them off, so it never waits for the daemon; and a
lookup never waits behind gigabytes of stores.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_daemon import Daemon
from kvtcd.integrations.vllm_jobs import Ended, Job, Jobs, Row

_LOG = logging.getLogger("vllm.kvtcd")  # below the logger that vLLM sets up


@dataclass(frozen=True, slots=True)
class Learned:
    """What the lookup thread found out: chunks by key, or that another daemon is there now."""

    found: Mapping[EngineKey, bool]
    restarted: bool = False


class Lookout:
    """Looks chunks up, and looks for a daemon that is away.

    Args:
        connect: makes the daemon, given what to call when it is found to be away.
    """

    def __init__(self, connect: Callable[[Callable[[], None]], Daemon]) -> None:
        self._wanted: queue.SimpleQueue[tuple[EngineKey, ...] | None] = queue.SimpleQueue()
        self._learned: queue.SimpleQueue[Learned] = queue.SimpleQueue()
        self.daemon = connect(lambda: self._wanted.put(()))  # wakes the thread that tries to reach it again
        self._thread = _started("lookup", self._look)

    def ask(self, keys: tuple[EngineKey, ...]) -> None:
        """Ask the daemon for chunks; the answer comes by `learned`."""
        if keys:
            self._wanted.put(keys)

    def learned(self) -> list[Learned]:
        """Return what was found out since the last call."""
        news = []
        while not self._learned.empty():
            news.append(self._learned.get_nowait())
        return news

    def close(self) -> None:
        """Stop the thread, and let go of the daemon."""
        self._wanted.put(None)
        self._thread.join()
        self.daemon.link.close()

    def _look(self) -> None:
        while True:
            try:
                keys = self._wanted.get(timeout=self.daemon.link.pause())
            except queue.Empty:
                keys = ()
            if keys is None:
                return
            try:
                if self.daemon.link.pause() == 0.0 and self.daemon.link.connect():
                    self._learned.put(Learned({}, restarted=True))
                found = self.daemon.find(keys) if keys else {}
            except Exception:  # noqa: BLE001 - the engine lives on whatever is wrong here; the log has it
                _LOG.exception("kvtcd: a lookup failed")
                found = {}
            if keys:
                self._learned.put(Learned({key: found.get(key, False) for key in keys}))


class Carriers:
    """Carry out jobs. `jobs` has every job that was begun, until it ended.

    Args:
        daemon: where chunks go and come from.
        row: bytes of a row of the engine's memory.
    """

    def __init__(self, daemon: Daemon, row: Row) -> None:
        self._daemon, self._row = daemon, row
        self._loads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._count_lock = threading.Lock()
        self._closed = False
        self.jobs = Jobs()
        self._threads = [
            _started("load", self._work, self._loads, self._load),
            _started("store", self._work, self._stores, self._store),
        ]

    def begin(self, job: Job) -> None:
        """Begin a job."""
        self.jobs.begin(job)
        if self._closed:
            self.jobs.abandon()
        elif job.is_load:
            self._loads.put(job)
        else:
            self._stores.put(job)

    def take_counts(self) -> Counter[str]:
        """Return how many chunks had which fate since the last call."""
        with self._count_lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Let what runs end, fail what waits, and stop the threads."""
        self._closed = True
        for lane in (self._loads, self._stores):
            lane.put(None)
        for thread in self._threads:
            thread.join()
        self.jobs.abandon()

    def _work(self, lane: queue.SimpleQueue[Job | None], carry_out: Callable[[Job], Ended]) -> None:
        while (job := lane.get()) is not None:
            started = time.monotonic()
            ended = Ended(job, (), complete=False)
            try:
                if not self._closed:
                    ended = carry_out(job)
            except Exception:  # noqa: BLE001 - the engine lives on whatever is wrong here; the log has it
                _LOG.exception("kvtcd: job %d failed", job.number)
            seconds = time.monotonic() - started
            self.jobs.end(Ended(job, ended.moved, ended.complete, seconds))

    def _load(self, job: Job) -> Ended:
        loaded = tuple(self._daemon.load(job.chunks, self._row))
        self._count(loaded=len(loaded), lost=len(job.chunks) - len(loaded))
        return Ended(job, loaded, job.whole and len(loaded) == len(job.chunks))

    def _store(self, job: Job) -> Ended:
        outcomes = self._daemon.store(job.chunks, self._row)
        self._count(**Counter(outcomes.values()), failed=len(job.chunks) - len(outcomes))
        kept = tuple(key for key, outcome in outcomes.items() if outcome != "dropped")
        return Ended(job, kept, len(outcomes) == len(job.chunks))

    def _count(self, **chunks: int) -> None:
        with self._count_lock:
            self._counts.update(chunks)


def _started(name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=f"kvtcd-vllm-{name}", daemon=True)
    thread.start()
    return thread
