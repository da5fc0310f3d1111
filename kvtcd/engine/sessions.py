"""One request's hold on blocks: a batch that is being stored, a lease that is being read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtcd.core import events as ev
from kvtcd.core.errors import BadRequest, BlockMismatch, Busy, DeadlineExceeded, UnknownNamespace
from kvtcd.core.keys import EngineKey, RecordKey, chain_root
from kvtcd.core.messages import BlockHead, BlockResult, Outcome
from kvtcd.core.place import Tier
from kvtcd.core.reason import Reason
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.ports import Bytes, Memory
from kvtcd.engine.recorder import Line, Recorder
from kvtcd.engine.steps import Origin

PIECE = 1 << 20
_MAX_FIRST = 1 << 62


@dataclass(slots=True)
class Text:
    """One sequence of tokens in a batch; `reach` is how long it is known to be."""

    reach: int = 0


class Slot:
    """Room for one block in host memory, filled piece by piece."""

    def __init__(
        self, key: EngineKey, record_key: RecordKey, nbytes: int, text: Text, pieces: Iterator[Bytes]
    ) -> None:
        self.key, self.record_key, self.nbytes, self.text = key, record_key, nbytes, text
        self.remaining = nbytes
        self._pieces = pieces
        self._piece = next(pieces)
        self._at = 0

    def write(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            BlockMismatch: more bytes than the block has.
        """
        if len(data) > self.remaining:
            raise BlockMismatch("body", f"{self.nbytes} bytes", "more")
        self.remaining -= len(data)
        source = np.frombuffer(data, dtype=np.uint8)
        while source.size:
            if self._at == self._piece.size:
                self._piece, self._at = next(self._pieces), 0
            part = min(source.size, self._piece.size - self._at)
            np.copyto(self._piece[self._at : self._at + part], source[:part])
            self._at += part
            source = source[part:]

    def spaces(self) -> list[Bytes]:
        """Return where the rest of it goes, in order, to be written otherwise; then it is `filled`."""
        rest = [self._piece[self._at :], *self._pieces]
        self._piece, self._at, self._pieces = rest[0], 0, iter(rest[1:])
        return rest

    def filled(self) -> None:
        """Take note that all its bytes are written."""
        self.remaining = 0


class Lease:
    """A block in host memory that stays while it is read; one without `pieces` has `landed` at its reader."""

    def __init__(
        self, key: EngineKey, nbytes: int, tokens: int, tier: Tier, pieces: list[Bytes] | None
    ) -> None:
        self.key, self.nbytes, self.tokens, self.tier = key, nbytes, tokens, tier
        self.landed = pieces is None
        self._pieces = pieces or []

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order, at most 1 MiB at a time; valid while the lease is held."""
        for piece in self._pieces:
            for start in range(0, piece.size, PIECE):
                yield piece[start : start + PIECE].data

    def copy_to(self, out: memoryview) -> None:
        """Copy the bytes to the beginning of a caller's memory.

        Raises:
            BadRequest: it is too small.
        """
        if len(out) < self.nbytes:
            raise BadRequest("length", f"{self.nbytes} bytes do not fit into {len(out)}")
        at, target = 0, np.frombuffer(out, dtype=np.uint8)
        for piece in self._pieces:
            np.copyto(target[at : at + piece.size], piece)
            at += piece.size


class Batch:
    """Blocks of one request, which become readable together when it is committed.

    Without a parent of their own, blocks continue each other in the order they come, and one whose
    `first_token` is 0 begins a sequence. Of a sequence shorter than the policy's `min_tokens` nothing is
    kept; how long it is shows only at the end, so its blocks take room until then. A batch that is to be
    durable rather waits for room than have others lost for it.

    Attributes:
        known: blocks that were here already.
    """

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        registry: Registry,
        *,
        namespace: Namespace,
        salt: bytes,
        deadline: float,
        metrics: Metrics,
        durable: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder, self._metrics = recorder, metrics
        self._driver, self._memory, self._registry = driver, memory, registry
        self._durable = durable
        self._namespace, self._salt = namespace, salt
        self._record_key = registry.record_keys(namespace, salt)
        self._tenant = registry.tenants[namespace.tenant]
        self._deadline = deadline
        self.known: list[RecordKey] = []
        self._results: list[BlockResult] = []
        self._open: list[Slot] = []
        self._held: list[tuple[EngineKey, RecordKey]] = []
        self._previous: RecordKey | None = None
        self._texts: dict[RecordKey, Text] = {}

    async def reserve(self, head: BlockHead, nbytes: int) -> Slot | None:
        """Take room for a block; None when its bytes are not wanted, and `commit` will say why.

        Raises:
            BlockMismatch: tokens or bytes do not fit the namespace.
            UnknownNamespace: it was purged meanwhile.
            Busy: no room could be made in time.
        """
        if not self._registry.admits(self._namespace):
            raise UnknownNamespace(self._namespace.name)
        self._check(head, nbytes)
        record_key, parent = self._record_key(head.key), self._parent(head)
        if self._recorder:
            self._recorder.note(
                Line("put", self._namespace, (record_key,), parent, tokens=head.tokens, nbytes=nbytes)
            )
        self._previous = record_key
        text = self._texts.get(parent) if parent else None
        position = head.first_token if head.first_token is not None else text.reach if text else 0
        text = self._texts[record_key] = text or Text()
        text.reach = max(text.reach, position + head.tokens)
        try:
            reason = await self._driver.ask(
                self._request(head, nbytes, record_key, parent, position), self._deadline
            )
        except DeadlineExceeded:
            raise Busy("the host tier") from None
        if reason is not None:
            self._refused(head.key, record_key, reason)
            return None
        slot = Slot(head.key, record_key, nbytes, text, iter(self._memory.pieces(record_key)))
        self._open.append(slot)
        return slot

    def _parent(self, head: BlockHead) -> RecordKey | None:
        if head.parent is not None:
            return self._record_key(head.parent)
        if head.first_token != 0:
            return self._previous
        if head.tokens < self._namespace.identity.block_tokens:
            # A partial first block hangs below the root of the chain, where a match looks for it.
            return self._record_key(chain_root(self._namespace.digest))
        return None

    def _request(
        self, head: BlockHead, nbytes: int, record_key: RecordKey, parent: RecordKey | None, position: int
    ) -> Request:
        created, ttl = time.time_ns() // 1_000_000, self._namespace.policy.disk.ttl
        older = self._record_key(head.supersedes) if head.supersedes else None
        origin = Origin(
            self._namespace, head.key, self._salt, parent, head.first_token, head.tokens, nbytes,
            created, None if ttl is None else created + 1000 * ttl,
        )  # fmt: skip

        def event(ticket: int) -> ev.Put:
            return ev.Put(
                ticket, record_key, self._namespace.number, head.tokens, nbytes, parent, older,
                position, patient=self._durable,
            )  # fmt: skip

        def granted(_: ev.Grant) -> None:
            self._memory.allocate(record_key, nbytes)
            self._driver.origins[record_key] = origin

        # A batch larger than the tier must not wait for room that its own finished blocks hold.
        return Request(event, granted, lambda _: ev.Abandoned(record_key), waits=self._publish)

    def _refused(self, key: EngineKey, record_key: RecordKey, reason: Reason) -> None:
        if reason is Reason.DUPLICATE:
            self._told(key, "duplicate")
            self.known.append(record_key)
            self._held.append((key, record_key))
        else:
            self._told(key, "dropped", reason)

    def _publish(self) -> None:
        """Make the finished blocks readable."""
        finished = [slot for slot in self._open if not slot.remaining]
        self._open = [slot for slot in self._open if slot.remaining]
        for slot in finished:
            self._driver.tell(ev.Filled(slot.record_key))
            self._told(slot.key, "stored")
            self._held.append((slot.key, slot.record_key))

    async def commit(self) -> list[BlockResult]:
        """Make the finished blocks readable, drop the others; a durable batch waits until they are on disk.

        Raises:
            DeadlineExceeded: they are stored, but not yet on disk.
        """
        least = self._namespace.policy.admit.min_tokens
        short = [slot for slot in self._open if not slot.remaining and slot.text.reach < least]
        self._drop(short, Reason.NOT_ADMITTED)
        self._publish()
        self._drop(self._open, "truncated")
        self._driver.tell(ev.Touch(tuple(record_key for _, record_key in self._held)))
        results = {result.key: result for result in self._results}
        if self._durable:
            for result in await settle(self._driver, self._tenant, self._held, self._deadline):
                if result.outcome == "dropped":
                    results[result.key] = result
        return list(results.values())

    def abandon(self) -> None:
        """Give back the room of blocks that were not finished."""
        self._drop(self._open, "truncated")

    def _drop(self, slots: list[Slot], reason: str) -> None:
        for slot in slots:
            self._driver.tell(ev.Abandoned(slot.record_key))
            self._told(slot.key, "dropped", reason)
        self._open = [slot for slot in self._open if slot not in slots]

    def _told(self, key: EngineKey, outcome: Outcome, reason: str | None = None) -> None:
        if not self._namespace.trial:
            self._metrics.puts.labels(outcome).inc()
        self._results.append(BlockResult(key, outcome, reason))

    def _check(self, head: BlockHead, nbytes: int) -> None:
        identity = self._namespace.identity
        if not 1 <= head.tokens <= identity.block_tokens:
            raise BlockMismatch("tokens", f"1 to {identity.block_tokens} in a block", head.tokens)
        want = identity.layout.nbytes(head.tokens)
        if nbytes != want:
            raise BlockMismatch("length", f"{want} bytes for {head.tokens} tokens", f"{nbytes} bytes")
        if head.first_token is not None and not 0 <= head.first_token < _MAX_FIRST:
            raise BadRequest("first_token", f"{head.first_token} is not a position")


async def settle(
    driver: Driver,
    tenant: Tenant,
    keys: Sequence[tuple[EngineKey, RecordKey]],
    deadline: float,
    *,
    evict: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[BlockResult]:
    """Wait until blocks are durable on disk; with `evict`, until the host has let go of them too.

    `progress` is told of each block, before the last commit is made final.

    Raises:
        DeadlineExceeded: not within the caller's time.
    """

    async def one(key: EngineKey, record_key: RecordKey) -> BlockResult:
        reason = await driver.ask(Request(lambda ticket: ev.Settle(ticket, (record_key,), evict)), deadline)
        progress()
        return BlockResult(key, "stored") if reason is None else BlockResult(key, "dropped", reason)

    results = await asyncio.gather(*(one(key, record_key) for key, record_key in keys))
    if tenant.writer is not None:
        await tenant.writer.exclusive(lambda environment: environment.sync())
    return results
