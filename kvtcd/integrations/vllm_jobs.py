"""Chunks on their way between an engine and the daemon: what a job moves, and that each one ends.

vLLM pins the rows of a job until it is told the result, so every job gets exactly one, and not before nothing
touches its rows any more. Pure but for the lock that the threads share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvtcd.core.keys import EngineKey
from kvtcd.core.kv_events import HASH_BYTES
from kvtcd.integrations.vllm_identity import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of the primary tier.

    Attributes:
        key: as vLLM made it.
        row: number of the row.
        tokens: of a full chunk of its group.
        first: position of its first token, if that is known.
        parent: key of the chunk before it, if that is known.
    """

    key: EngineKey
    row: int
    tokens: int
    first: int | None
    parent: EngineKey | None

    @property
    def group(self) -> int:
        """Number of the cache group."""
        return group_of(self.key)


def group_of(key: bytes) -> int:
    """Return the number of the cache group that a key ends with."""
    return int.from_bytes(key[HASH_BYTES:], "big")


def is_ours(key: bytes, groups: Collection[int]) -> bool:
    """Tell whether a key is a cryptographic hash and a known group: no shorter hash is believed."""
    return len(key) == KEY_BYTES and group_of(key) in groups


class Chains:
    """Where the chunks of running requests lie: from the end position of each key to the one before it.

    Args:
        tokens: of a chunk, by group.
    """

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self._tokens = tokens
        self._ends: dict[str, dict[tuple[int, int], EngineKey]] = {}

    def seen(self, request: str, key: EngineKey, end: int | None) -> None:
        """Note a key and the position after its last token."""
        if end is not None:
            self._ends.setdefault(request, {})[group_of(key), end] = key

    def chunk(self, request: str, key: EngineKey, end: int | None, row: int) -> Chunk:
        """Return what a job moves; a chunk that ends early begins where a full one does."""
        tokens = self._tokens[group_of(key)]
        if not end:
            return Chunk(key, row, tokens, None, None)
        first = (end - 1) // tokens * tokens
        return Chunk(key, row, tokens, first, self._ends.get(request, {}).get((group_of(key), first)))

    def finished(self, request: str) -> None:
        """Forget a request."""
        self._ends.pop(request, None)

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._ends)


def runs(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Split chunks so that in a run each has a parent, or is the first: a daemon takes order for descent.

    vLLM names the chunks of a request in any order; a parent comes before its child here.
    """
    run: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.group, chunk.first or 0)):
        if run and (chunk.parent is None or chunk.group != run[0].group):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def pieces(chunks: Iterable[Chunk], most: int) -> Iterator[list[Chunk]]:
    """Split chunks into pieces of one group and at most so many."""
    piece: list[Chunk] = []
    for chunk in chunks:
        if piece and (len(piece) == most or chunk.group != piece[0].group):
            yield piece
            piece = []
        piece.append(chunk)
    if piece:
        yield piece


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer that vLLM asked for; `whole` unless keys were left out that are none of ours."""

    number: int
    chunks: tuple[Chunk, ...]
    is_load: bool
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: which keys are where they should be, and whether that is all of them."""

    job: Job
    moved: tuple[EngineKey, ...]
    complete: bool
    seconds: float = 0.0


class Jobs:
    """Jobs that run, and those that ended and were not told yet. Any thread may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[int, Job] = {}
        self._ended: list[Ended] = []

    def begin(self, job: Job) -> None:
        """Note a job before any thread works on it."""
        with self._changed:
            self._running[job.number] = job

    def end(self, ended: Ended) -> None:
        """Note how a job ended; only the first time counts."""
        with self._changed:
            if self._running.pop(ended.job.number, None) is not None:
                self._ended.append(ended)
                self._changed.notify_all()

    def take(self) -> list[Ended]:
        """Return what ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def result(self, number: int, seconds: float) -> Ended | None:
        """Wait for one job and take how it ended; None if it still runs after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: number not in self._running, max(0.0, seconds))
            for ended in self._ended:
                if ended.job.number == number:
                    self._ended.remove(ended)
                    return ended
            return None

    def drain(self) -> None:
        """Return once no job runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def abandon(self) -> None:
        """End every job that no thread will work on any more."""
        with self._changed:
            running = list(self._running.values())
        for job in running:
            self.end(Ended(job, (), complete=False))

    @property
    def running(self) -> int:
        """How many jobs run."""
        return len(self._running)

    @property
    def loading(self) -> bool:
        """Whether one of them loads."""
        with self._changed:
            return any(job.is_load for job in self._running.values())


Row = Callable[[int], memoryview]
"""Returns the bytes of a row of the primary tier, without padding, by its number."""
