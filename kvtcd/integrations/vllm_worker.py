"""The worker half of the connector: fills pages before a layer reads them, takes them when a step is done.

A step waits for its chunks once, at the first layer that needs them, and no longer than it may: what is late
is computed. The engine's pages are touched by the engine's own thread alone, so a chunk that comes too late
can do no harm.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from kvtcd.integrations.vllm_jobs import Chunk, Job
from kvtcd.integrations.vllm_staging import Staging
from kvtcd.integrations.vllm_steps import Move, Sent, Step
from kvtcd.integrations.vllm_threads import Carriers

_LOG = logging.getLogger("vllm.kvtcd")  # below the logger that vLLM sets up


class Worker:
    """Carries out steps, for the thread that runs the model.

    Args:
        staging: makes memory for chunks, at start and when the daemon holds on to what it was lent.
        carriers: makes the threads that move chunks between it and the daemon, given its rows.
        tokens: of a chunk.
        seconds: that a step may wait for its chunks.
    """

    def __init__(
        self,
        staging: Callable[[], Staging],
        carriers: Callable[[Callable[[int], memoryview]], Carriers],
        *,
        tokens: int,
        seconds: float,
    ) -> None:
        self._new_staging, self._tokens, self._seconds = staging, tokens, seconds
        self._staging = staging()
        self._carriers = carriers(self._row)
        self._numbers = count()
        self._slots: dict[int, list[int]] = {}
        """Slots of each job that was begun."""
        self._step = Step()
        self._moves: dict[int, Move] = {}
        """What this step loads, by slot; what has not arrived is taken out."""
        self._job: int | None = None
        self._until = 0.0
        self._unread: set[str] = set()
        self._bad: set[int] = set()
        self._failures = 0
        self._counts: Counter[str] = Counter()
        self._sent = Sent()

    def begin(self, step: Step) -> None:
        """Begin to load what a step needs."""
        self._step = step  # first of all, so that `give_up` knows what it has to name
        self._settle()
        self._unread = set(self._staging.layers)
        if not step.loads:
            return
        slots = self._staging.for_loads
        late = self._carriers.jobs.loading
        if late or len(slots) < len(step.loads) or self._staging.region.closed:
            self._counts["overdue"] += len(step.loads)
            self.give_up()  # behind a load that is late already this one would be too
            return
        self._moves = {slots.pop(): move for move in step.loads}
        self._until = time.monotonic() + self._seconds
        self._job = self._begin(self._moves, is_load=True)

    def layer(self, name: str) -> None:
        """Return once a layer's pages hold what was to be loaded, or are known not to."""
        self._arrive()
        if self._moves and name in self._unread:
            self._unread.discard(name)
            for slot, move in self._moves.items():
                self._staging.fill(name, slot, move)

    def end(self) -> None:
        """Take the pages of chunks that are complete now."""
        self._arrive()
        if self._moves and self._unread == self._staging.layers:
            _LOG.error("kvtcd: the model has run without asking for its layers; what was loaded is not used")
            self.give_up()
        for name in self._unread:  # layers of a draft model that did not run
            for slot, move in self._moves.items():
                self._staging.fill(name, slot, move)
        self._staging.for_loads += self._moves
        self._moves = {}
        stores, self._step = self._step.stores, Step(failures=self._step.failures)
        if stores:
            self._store(stores)
        self._settle()

    def take_failed(self) -> set[int]:
        """Return the engine's blocks that were not loaded since the last call."""
        bad, self._bad = self._bad, set()
        self._failures += bool(bad)
        return bad

    def give_up(self) -> None:
        """Load and store nothing more in this step: all of its blocks are as good as not loaded."""
        for move in self._step.loads:
            self._bad.update(move.blocks)
        self._pass_over(self._step.stores)
        self._step = replace(self._step, stores=())
        if self._job is None:
            self._staging.for_loads += self._moves
        self._moves, self._job = {}, None

    def take_sent(self) -> Sent:
        """Return which chunks are not on their way to the daemon any more since the last call."""
        sent, self._sent = self._sent, Sent()
        return sent

    def take_counts(self) -> Counter[str]:
        """Return how many chunks had which fate since the last call."""
        counts = self._carriers.take_counts() + self._counts
        self._counts.clear()
        return counts

    def close(self) -> None:
        """Let transfers end, and stop the threads."""
        self._carriers.close()

    def _row(self, slot: int) -> memoryview:
        return self._staging.row(slot)

    def _arrive(self) -> None:
        """Wait for what this step loads, for as long as it may; what has not come by then is bad."""
        if self._job is None:
            return
        number, self._job = self._job, None
        ended = self._carriers.jobs.result(number, self._until - time.monotonic())
        if ended is None:
            self._counts["overdue"] += len(self._moves)
            self._moves = {}  # its slots are its own until it ends
            self.give_up()
            return
        del self._slots[number]
        for slot, move in list(self._moves.items()):
            if move.key not in ended.moved:
                self._bad.update(move.blocks)
                self._staging.for_loads.append(slot)
                del self._moves[slot]

    def _store(self, stores: tuple[Move, ...]) -> None:
        # Whatever follows from a block that was not loaded is wrong, in later steps too that were
        # planned before the scheduler knew.
        sound = not self._bad and self._step.failures == self._failures
        slots = self._staging.for_stores
        taken: dict[int, Move] = {}
        try:
            for move in stores:
                if sound and slots and not self._staging.region.closed:
                    self._staging.take(slots[-1], move)
                    taken[slots.pop()] = move
        finally:  # a copy that fails costs neither its slot nor what was taken before it
            sent = {move.key for move in taken.values()}
            self._pass_over(tuple(move for move in stores if move.key not in sent))
            if taken:
                self._begin(taken, is_load=False)

    def _pass_over(self, stores: tuple[Move, ...]) -> None:
        """Have the scheduler know that chunks are not on their way."""
        self._counts["dropped"] += len(stores)
        self._sent |= Sent(frozenset(move.key for move in stores))

    def _begin(self, moves: dict[int, Move], *, is_load: bool) -> int:
        number = next(self._numbers)
        self._slots[number] = list(moves)
        chunks = tuple(
            Chunk(move.key, slot, self._tokens, move.first, move.parent) for slot, move in moves.items()
        )
        self._carriers.begin(Job(number, chunks, is_load))
        return number

    def _settle(self) -> None:
        """Take back the slots of jobs that have ended."""
        for ended in self._carriers.jobs.take():
            free = self._staging.for_loads if ended.job.is_load else self._staging.for_stores
            free += self._slots.pop(ended.job.number)
            if not ended.job.is_load:
                keys = frozenset(chunk.key for chunk in ended.job.chunks)
                self._sent |= Sent(keys, frozenset(ended.moved))
        if self._staging.region.closed and not self._carriers.jobs.running and not self._moves:
            self._staging = self._new_staging()
