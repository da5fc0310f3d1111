"""Which chunks are in the daemon, as far as running requests have asked: pure, for the scheduler's thread.

vLLM asks for each key again and again until the answer is no longer RETRY, with no limit of its own. Here it
is one: an answer that takes longer than `patience` seconds is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtcd.core.keys import EngineKey


class Answer(Enum):
    """What a tier says of one chunk."""

    HIT = auto()
    MISS = auto()
    RETRY = auto()


@dataclass(slots=True)
class _Entry:
    """One key: what is known, and since when each request asks."""

    found: bool | None = None
    lost: bool = False
    requests: dict[str, float] = field(default_factory=dict)


class Lookups:
    """Verdicts by key, kept while a request that asked for it runs.

    Args:
        patience: seconds after which no answer is a miss.

    Attributes:
        counts: of first verdicts: ``hit``, ``miss``, ``late``.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._entries: dict[EngineKey, _Entry] = {}
        self._by_request: dict[str, set[EngineKey]] = {}
        self._to_ask: list[EngineKey] = []
        self._silent_since: float | None = None
        self.counts: Counter[str] = Counter()

    def ask(self, key: EngineKey, request: str, now: float) -> Answer:
        """Say what is known of a key; what is not known yet is put on the list of `take`.

        A miss, or a block that could not be loaded, is asked for anew when another request wants it.
        """
        entry = self._entries.get(key)
        if entry is None:
            if self._silent_since is not None and now - self._silent_since >= self._patience:
                self.counts["late"] += 1
                return Answer.MISS  # whoever asked before had no answer in time
            entry = self._entries[key] = _Entry()
            self._to_ask.append(key)
        elif request not in entry.requests and (entry.found is False or entry.lost):
            entry.found, entry.lost = None, False
            self._to_ask.append(key)
        first = request not in entry.requests
        since = entry.requests.setdefault(request, now)
        self._by_request.setdefault(request, set()).add(key)
        if entry.lost:
            return Answer.MISS
        if entry.found is None:
            if now - since < self._patience:
                return Answer.RETRY
            self.counts["late"] += 1
            return Answer.MISS
        if first:
            self.counts["hit" if entry.found else "miss"] += 1
        return Answer.HIT if entry.found else Answer.MISS

    def take(self, now: float) -> tuple[EngineKey, ...]:
        """Return the keys to ask the daemon for, each once. It owes an answer from now on."""
        keys, self._to_ask = self._to_ask, []
        wanted = tuple(dict.fromkeys(key for key in keys if key in self._entries))
        if wanted and self._silent_since is None:
            self._silent_since = now
        return wanted

    def learn(self, found: Mapping[EngineKey, bool]) -> None:
        """Note what the daemon answered. What comes late still helps those who ask later."""
        self._silent_since = None
        for key, is_there in found.items():
            entry = self._entries.get(key)
            if entry is None or entry.lost:
                continue
            if entry.found is None:
                self.counts["hit" if is_there else "miss"] += 1
            entry.found = is_there or entry.found is True  # it was stored since it was looked for

    def known(self, key: EngineKey, request: str, now: float) -> Answer:
        """Say the same as `ask`, but ask for nothing: who has not asked has a miss."""
        entry = self._entries.get(key)
        if entry is None or entry.lost or request not in entry.requests:
            return Answer.MISS
        if entry.found is None:
            return Answer.RETRY if now - entry.requests[request] < self._patience else Answer.MISS
        return Answer.HIT if entry.found else Answer.MISS

    def stored(self, keys: Iterable[EngineKey]) -> None:
        """Note that chunks are in the daemon now."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None and not entry.lost:
                entry.found = True

    def lost(self, keys: Iterable[EngineKey]) -> None:
        """Note that chunks could not be loaded: misses for all who run now, lest they try for ever."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                entry.lost = True

    def forget(self) -> None:
        """Ask for everything anew: the daemon was started again."""
        for key, entry in self._entries.items():
            if not entry.lost:
                entry.found = None
                self._to_ask.append(key)

    def finished(self, request: str) -> None:
        """Let go of what only this request asked for."""
        for key in self._by_request.pop(request, ()):
            entry = self._entries[key]
            entry.requests.pop(request, None)
            if not entry.requests:
                del self._entries[key]

    def __len__(self) -> int:
        """Keys that are known or asked for."""
        return len(self._entries)
