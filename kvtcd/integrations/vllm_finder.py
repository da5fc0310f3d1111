"""Which chunks are there, for a scheduler that asks before it computes and never waits for an answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_daemon import Daemon
from kvtcd.integrations.vllm_jobs import is_ours
from kvtcd.integrations.vllm_lookups import Answer, Lookups
from kvtcd.integrations.vllm_threads import Lookout


class Finder:
    """Lookups of one scheduler, for its thread.

    Args:
        connect: makes the daemon, see `Lookout`.
        groups: numbers of the cache groups.
        patience: seconds after which no answer is a miss.

    Attributes:
        daemon: as it is known to be.
    """

    def __init__(
        self, connect: Callable[[Callable[[], None]], Daemon], groups: Collection[int], patience: float
    ) -> None:
        self._lookout = Lookout(connect)
        self.daemon = self._lookout.daemon
        self._groups = groups
        self._lookups = Lookups(patience)
        self._counts: Counter[str] = Counter()

    def ask(self, key: bytes, request: str) -> Answer:
        """Say what is known of a chunk: RETRY until the daemon has answered, for a while."""
        if not is_ours(key, self._groups):
            self._counts["foreign"] += 1
            return Answer.MISS
        if self.daemon.link.away:
            self._counts["away"] += 1
            return Answer.MISS
        self._learn()
        return self._lookups.ask(EngineKey(key), request, time.monotonic())

    def send(self) -> None:
        """Send what was asked for since the last time."""
        self._learn()
        self._lookout.ask(self._lookups.take(time.monotonic()))

    def known(self, key: EngineKey, request: str) -> Answer:
        """Say what is known of a chunk that a request has asked for, and ask for nothing."""
        return self._lookups.known(key, request, time.monotonic())

    def stored(self, keys: Iterable[EngineKey]) -> None:
        """Note that chunks are there now."""
        self._lookups.stored(keys)

    def lost(self, keys: Iterable[EngineKey]) -> None:
        """Note that chunks could not be loaded."""
        self._lookups.lost(keys)

    def forget(self) -> None:
        """Ask for everything anew."""
        self._lookups.forget()

    def finished(self, request: str) -> None:
        """Let go of what only this request asked for."""
        self._lookups.finished(request)

    def take_counts(self) -> Counter[str]:
        """Return how many chunks had which fate since the last call."""
        counts = self._counts + self._lookups.counts
        self._counts.clear()
        self._lookups.counts.clear()
        return counts

    def close(self) -> None:
        """Stop, and let go of the daemon."""
        self._lookout.close()

    def _learn(self) -> None:
        for news in self._lookout.learned():
            if news.restarted:
                self._lookups.forget()
            self._lookups.learn(news.found)
