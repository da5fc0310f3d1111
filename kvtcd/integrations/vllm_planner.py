"""The scheduler half of the connector: what each step loads and stores. Pure but for the finder's threads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvtcd.core.keys import EngineKey
from kvtcd.integrations.vllm_finder import Finder
from kvtcd.integrations.vllm_identity import GROUP_BYTES
from kvtcd.integrations.vllm_jobs import is_ours
from kvtcd.integrations.vllm_lookups import Answer
from kvtcd.integrations.vllm_steps import Move, Sent, Step

_LOG = logging.getLogger("vllm.kvtcd")  # below the logger that vLLM sets up
_GROUP, _GROUPS = bytes(GROUP_BYTES), (0,)
"""The only cache group there is."""


@dataclass(slots=True)
class _Request:
    """A request that runs or waits.

    Attributes:
        keys: of the whole chunks of its prompt.
        prompt: its tokens.
        blocks: of the engine that hold it, in order.
        complete, saved: chunks that are computed, and those of them that need no thought any more. The rest
            waits for an answer: most of it is there already, where vLLM's own cache has it.
        begin, loading: where what is loaded begins, and how many tokens the next step loads.
        loaded: what was loaded last.
    """

    keys: tuple[EngineKey, ...]
    prompt: int
    blocks: list[int] = field(default_factory=list)
    complete: int = 0
    saved: int = 0
    begin: int = 0
    loading: int = 0
    loaded: tuple[Move, ...] = ()


@contextmanager
def _living_on() -> Iterator[None]:
    """Let the engine live on whatever is wrong with a part of a plan; the log has it."""
    try:
        yield
    except Exception:  # noqa: BLE001 - the log has it
        _LOG.exception("kvtcd: planning failed in part")


class Planner:
    """Plans steps, for the scheduler's thread.

    Args:
        finder: knows which chunks are there.
        chunk: tokens of a chunk.
        block: tokens of a block of the engine.
        hashed: tokens that each of vLLM's block hashes stands for.
        slots: chunks that one step can load.
    """

    def __init__(self, finder: Finder, *, chunk: int, block: int, hashed: int, slots: int) -> None:
        self._finder = finder
        self._chunk, self._block, self._per_hash, self._slots = chunk, block, chunk // hashed, slots
        self._requests: dict[str, _Request] = {}
        self._held: set[str] = set()
        """Finished requests that keep their blocks until it is known what of them has to be stored."""
        self._storing: set[EngineKey] = set()
        """Chunks on their way to the daemon."""
        self._failures = self._used = 0

    def arrived(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """Begin to look for a request's chunks, ahead of its turn."""
        for key in self._of(request).keys:
            self._finder.ask(key, request.request_id)
        self._finder.send()

    def matched(self, request: Any, computed: int) -> int | None:  # noqa: ANN401 - vLLM's
        """Return how many tokens after the first `computed` can be loaded; None: not known yet."""
        known = self._of(request)
        answers = [self._finder.ask(key, request.request_id) for key in known.keys]
        self._finder.send()
        first = end = computed // self._chunk
        for answer in answers[first : first + max(0, self._slots - self._used)]:
            if answer is Answer.RETRY:
                return None
            if answer is Answer.MISS:
                break
            end += 1
        known.begin = computed
        at_most = (known.prompt - 1) // self._block * self._block  # one token at least is computed
        return max(0, min(end * self._chunk, at_most) - computed)

    def allocated(self, request: Any, tokens: int) -> None:  # noqa: ANN401 - vLLM's
        """Note that blocks are there for so many tokens to be loaded."""
        if tokens > 0:
            known = self._of(request)
            known.loading = tokens
            self._used += len(self._touched(known.begin, known.begin + tokens))

    def step(self, scheduled: Any) -> Step:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Plan a step that vLLM has scheduled."""
        loads: list[Move] = []
        stores: list[Move] = []
        self._used = 0
        with _living_on():
            self._finder.send()
        try:
            for name, computed in self._scheduled(scheduled):
                known = self._requests[name]
                if known.loading:
                    known.loaded = tuple(self._to_load(known))
                    loads += known.loaded
                    known.loading = 0  # not before, so that what is `promised` is known if this fails
                end = min(computed + scheduled.num_scheduled_tokens.get(name, 0), known.prompt)
                known.complete = end // self._chunk
                with _living_on():
                    stores.extend(self._to_store(name, known))
        except Exception:
            if self.promised:
                raise
            _LOG.exception("kvtcd: planning failed")
        released = []
        for name in sorted(self._held):
            done = True  # whatever fails here: vLLM keeps the blocks of a request until it is named
            with _living_on():
                known = self._requests[name]
                stores.extend(self._to_store(name, known))
                done = known.saved >= known.complete
            if done:
                released.append(name)
                with _living_on():
                    self._forget(name)
        return Step(tuple(loads), tuple(stores), self._failures, tuple(released))

    def failed(self, blocks: Iterable[int]) -> None:
        """Note blocks that a step could not load: what was computed from them is computed anew."""
        if not (bad := set(blocks)):
            return
        self._failures += 1
        for known in self._requests.values():
            self._finder.lost(move.key for move in known.loaded if bad.intersection(move.blocks))
            first = next((i for i, block in enumerate(known.blocks) if block in bad), None)
            if first is not None:
                known.complete = min(known.complete, first * self._block // self._chunk)
                known.saved = min(known.saved, known.complete)
                self._storing.difference_update(known.keys[known.complete :])  # the worker drops them

    def finished(self, request_id: str, blocks: Sequence[int]) -> bool:
        """Forget a request, unless something of it may have to be stored: then the next steps see to it.

        Args:
            request_id: of the request.
            blocks: those it has now; none, if it was preempted.

        Returns:
            Whether it keeps its blocks until a step has `released` it: no longer than lookups may take.
        """
        known = self._requests.get(request_id)
        if known is None:
            return False
        with _living_on():  # whatever fails here: a request that does not keep its blocks is forgotten
            self._finder.send()
            known.blocks = list(blocks)
            known.complete = min(known.complete, len(blocks) * self._block // self._chunk)
            if any(self._awaited(request_id, key) for key in known.keys[known.saved : known.complete]):
                self._held.add(request_id)
                return True
        self._forget(request_id)
        return False

    def sent(self, sent: Sent) -> None:
        """Note chunks that are not on their way any more."""
        self._storing -= sent.keys
        self._finder.stored(sent.there)

    @property
    def promised(self) -> bool:
        """Whether the next step has to load something."""
        return any(known.loading for known in self._requests.values())

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._requests)

    def _of(self, request: Any) -> _Request:  # noqa: ANN401 - vLLM's
        known = self._requests.get(request.request_id)
        if known is None:
            whole = request.num_prompt_tokens // self._chunk
            hashes = request.block_hashes[self._per_hash - 1 :: self._per_hash][:whole]
            keys = tuple(EngineKey(bytes(one) + _GROUP) for one in hashes)
            known = self._requests[request.request_id] = _Request(keys, request.num_prompt_tokens)
        return known

    def _scheduled(self, scheduled: Any) -> Iterable[tuple[str, int]]:  # noqa: ANN401 - vLLM's
        """Yield the requests of a step that are known, with their computed tokens, once their blocks are."""
        for new in scheduled.scheduled_new_reqs:
            if known := self._requests.get(new.req_id):
                known.blocks = list(new.block_ids[0])
                yield new.req_id, new.num_computed_tokens
        running = scheduled.scheduled_cached_reqs
        for i, name in enumerate(running.req_ids):
            if known := self._requests.get(name):
                more = running.new_block_ids[i]
                if name in running.resumed_req_ids:
                    known.blocks = []
                known.blocks += more[0] if more else ()
                yield name, running.num_computed_tokens[i]

    def _touched(self, begin: int, end: int) -> Sequence[int]:
        return range(begin // self._chunk, -(-end // self._chunk))

    def _move(self, known: _Request, chunk: int, begin: int, end: int) -> Move:
        """Return the part of a chunk that lies within the tokens ``[begin, end)``."""
        first = chunk * self._chunk
        start, stop = max(begin, first) // self._block, min(end, first + self._chunk) // self._block
        parent = known.keys[chunk - 1] if chunk else None
        blocks = tuple(known.blocks[start:stop])
        return Move(known.keys[chunk], first, parent, blocks, start - first // self._block)

    def _to_load(self, known: _Request) -> Iterable[Move]:
        begin, end = known.begin, known.begin + known.loading
        return (self._move(known, chunk, begin, end) for chunk in self._touched(begin, end))

    def _to_store(self, name: str, known: _Request) -> Iterable[Move]:
        """Yield complete chunks that the daemon does not have, up to the first of which that is not known."""
        while known.saved < min(known.complete, len(known.keys)):
            key, first = known.keys[known.saved], known.saved * self._chunk
            if self._awaited(name, key):
                if self._finder.known(key, name) is Answer.RETRY:
                    return
                move = self._move(known, known.saved, first, first + self._chunk)
                self._storing.add(key)
                yield move
            known.saved += 1

    def _awaited(self, name: str, key: EngineKey) -> bool:
        """Tell whether a chunk may have to be stored."""
        if self._finder.daemon.link.away or key in self._storing or not is_ours(key, _GROUPS):
            return False
        return self._finder.known(key, name) is not Answer.HIT

    def _forget(self, name: str) -> None:
        self._requests.pop(name, None)
        self._held.discard(name)
        self._finder.finished(name)
