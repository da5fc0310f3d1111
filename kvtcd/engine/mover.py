"""Carries out one move: read, change form, write. The only place where raw becomes packed and back.

Either way is a pipeline, so that the stages of successive blocks overlap::

    promote     read | check | inflate | synthesize | scatter
    demote      gather | analyze | deflate | seal | commit

The last stage of a demotion is the writer's, which commits several records at once; by then a block has left
the ring, since all that is left of it is its record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtcd.core import blob as blobs
from kvtcd.core import record as records
from kvtcd.core.blob import Blob
from kvtcd.core.errors import Corrupt, KvtcdError, StoreFailed, Truncated, UnknownProfile
from kvtcd.core.events import Event, Move, Moved, MoveFailed, Reason, Tier
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.layout import Layout
from kvtcd.core.record import Envelope
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.pipeline import Pipeline
from kvtcd.engine.ports import Bytes, Inflated, Memory, Packed, PutRecord, Scratch
from kvtcd.engine.streams import Stages, Watch
from kvtcd.engine.timeline import Span

DEPTH = 3
"""Blocks in flight either way: one in its slowest stage, one on either side of it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the envelope of a block says that its bytes do not."""

    namespace: Namespace
    engine_key: EngineKey
    salt: bytes
    parent: RecordKey | None
    first_token: int | None
    tokens: int
    raw_bytes: int
    created: int
    expires: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a move ended; `origin` is what a block that came up said of itself."""

    event: Event
    origin: Origin | None = None


class _Record(NamedTuple):
    envelope: bytes
    blob: bytearray


class _Checked(NamedTuple):
    envelope: Envelope
    blob: Blob


class Mover:
    """Moves between host memory and the disk of the block's tenant.

    Args:
        memory: the host tier.
        put_record: makes a record for the disk tier.
        stages: where the stages run.
        scratch: makes the memory of one block in flight.
        metrics: told what happened.
        footprint: bytes the disk tier accounts a record with, from lengths of envelope and blob.
        observers: told of every stage of every block.
    """

    def __init__(
        self,
        *,
        memory: Memory,
        put_record: PutRecord,
        stages: Stages,
        scratch: Callable[[], Scratch],
        metrics: Metrics,
        footprint: Callable[[int, int], int],
        observers: Sequence[Callable[[Span], None]] = (),
    ) -> None:
        self._memory, self._put_record = memory, put_record
        self._metrics, self._footprint = metrics, footprint
        told = (metrics.staged, *observers)
        self._stages = stages
        self._promotions = Pipeline("promote", [scratch() for _ in range(DEPTH)], told)
        self._demotions = Pipeline("demote", [scratch() for _ in range(DEPTH)], told)

    async def demote(self, move: Move, origin: Origin, tenant: Tenant) -> Outcome:
        """Pack a raw host block and store it on disk."""
        assert tenant.writer is not None, "the catalog demotes only to a tier that exists"
        try:
            record, watch = await self._pack(move, origin, tenant)
            nbytes = self._footprint(len(record.envelope), len(record.blob))
            await tenant.writer.put(self._put_record(move.key, *record), nbytes, watch)
        except KvtcdError as error:
            return self._failed(move, error)
        self._metrics.moved(move.source, move.target, None)
        return Outcome(Moved(move.key, nbytes))

    async def promote(self, move: Move, namespace: Namespace, tenant: Tenant) -> Outcome:
        """Read a block from disk, check it, unpack it into host memory."""
        try:
            envelope = await self._unpack(move.key, namespace, tenant)
        except KvtcdError as error:
            return self._failed(move, error)
        self._metrics.moved(move.source, move.target, None)
        origin = Origin(
            namespace, envelope.engine_key, envelope.salt, envelope.parent, envelope.first_token,
            envelope.tokens, envelope.raw_bytes, envelope.created, envelope.expires,
        )  # fmt: skip
        return Outcome(Moved(move.key, envelope.raw_bytes), origin)

    def _failed(self, move: Move, error: KvtcdError) -> Outcome:
        # A block whose profile has gone cannot be served; forgetting it lets a client store it anew.
        damaged = isinstance(error, Corrupt | UnknownProfile)
        if damaged:
            self._metrics.damaged.labels(type(error).__name__).inc()
        self._metrics.moved(move.source, move.target, Reason.DAMAGED if damaged else Reason.FAILED)
        log = _log.debug if isinstance(error, StoreFailed) else _log.warning  # the writer logs store failures
        log("move %s to %s failed: %s", move.source, move.target, error)
        return Outcome(MoveFailed(move.key, damaged=damaged and move.source is Tier.DISK))

    async def _pack(self, move: Move, origin: Origin, tenant: Tenant) -> tuple[_Record, Watch | None]:
        """Make the record of a block; also return who is told of its commit."""
        stages, codec = self._stages, origin.namespace.codec
        async with self._demotions.enter() as flight:
            scratch, pieces = flight.slot, self._memory.pieces(move.key)
            deflated = (
                flight.begin(stages.gather, lambda: _gather(pieces, scratch))
                .then(
                    stages.analyze,
                    lambda raw: codec.analyze(
                        raw, tokens=origin.tokens, first_token=origin.first_token, after=move.after,
                        scratch=scratch,
                    ),
                )
                .then(stages.deflate, lambda analyzed: analyzed.deflate())
            )  # fmt: skip
            sealed = deflated.then(stages.seal, lambda packed: _seal(packed, move.key, origin, tenant))
            record, packed = await sealed.end(), await deflated.end()
            watch = self._demotions.watch("commit", flight.number)
        self._metrics.packed.labels(packed.codec.name.lower()).inc()
        if packed.reason:
            self._metrics.lossless_because.labels(packed.reason).inc()
        self._metrics.raw_bytes.inc(origin.raw_bytes)
        self._metrics.blob_bytes.inc(len(packed.blob))
        return record, watch

    async def _unpack(self, key: RecordKey, namespace: Namespace, tenant: Tenant) -> Envelope:
        """Bring a block into its place in memory; return its envelope."""
        stages, codec, layout = self._stages, namespace.codec, namespace.identity.layout
        async with self._promotions.enter() as flight:
            scratch, pieces = flight.slot, self._memory.pieces(key)
            checked = flight.begin(stages.read, lambda: _read(key, tenant, scratch)).then(
                stages.check, lambda found: _check(found, key, tenant, layout)
            )
            placed = (
                checked.then(stages.inflate, lambda record: codec.inflate(record.blob, scratch))
                .then(stages.synthesize, lambda inflated: _synthesize(inflated, pieces, scratch))
                .then(stages.scatter, lambda whole: _scatter(whole, pieces))
            )
            await placed.end()
            return (await checked.end()).envelope


def _gather(pieces: Sequence[Bytes], scratch: Scratch) -> Bytes:
    """Return a block as one array: in place when it is one piece, else a copy."""
    if len(pieces) == 1:
        return pieces[0]
    whole = scratch.take(sum(piece.size for piece in pieces))
    np.concatenate(pieces, out=whole)
    return whole


def _seal(packed: Packed, key: RecordKey, origin: Origin, tenant: Tenant) -> _Record:
    envelope = Envelope(
        key=key, tenant_tag=tenant.keys.tag, key_id=tenant.keys.key_id,
        namespace=origin.namespace.digest, generation=origin.namespace.generation,
        engine_key=origin.engine_key, salt=origin.salt, parent=origin.parent,
        first_token=origin.first_token, tokens=origin.tokens, raw_bytes=origin.raw_bytes,
        blob_bytes=len(packed.blob), created=origin.created, expires=origin.expires,
        blob_mac=records.blob_mac(tenant.keys, packed.blob),
    )  # fmt: skip
    return _Record(records.seal(tenant.keys, envelope), packed.blob)


def _read(key: RecordKey, tenant: Tenant, scratch: Scratch) -> tuple[bytes, Bytes]:
    assert tenant.writer is not None, "the catalog promotes only from a tier that exists"
    found = tenant.writer.environment.read(key, scratch.take)
    if found is None:
        raise Truncated("record", "is missing")
    return found


def _check(found: tuple[bytes, Bytes], key: RecordKey, tenant: Tenant, layout: Layout) -> _Checked:
    """Check envelope, MACs and the form of the blob: the whole record, before a byte of it is decoded."""
    envelope = records.open_envelope(tenant.keys, key, found[0])
    data = found[1].data
    records.check_blob(tenant.keys, envelope, data)
    blob = blobs.parse(data)
    if (blob.header.tokens, blob.header.raw_bytes) != (envelope.tokens, envelope.raw_bytes):
        raise Truncated("blob", "has another length than its envelope says")
    if blob.header.layout != layout.digest or layout.nbytes(envelope.tokens) != envelope.raw_bytes:
        raise Truncated("blob", "is of another layout than its namespace")
    return _Checked(envelope, blob)


def _synthesize(inflated: Inflated, pieces: Sequence[Bytes], scratch: Scratch) -> Bytes:
    """Return the block as one array: in place when that is one piece."""
    whole = pieces[0] if len(pieces) == 1 else scratch.take(sum(piece.size for piece in pieces))
    inflated.synthesize(whole)
    return whole


def _scatter(whole: Bytes, pieces: Sequence[Bytes]) -> None:
    """Copy one array over the pieces of a block, unless it is the only one."""
    start = 0
    for piece in pieces if len(pieces) > 1 else ():
        np.copyto(piece, whole[start : start + piece.size])
        start += piece.size
