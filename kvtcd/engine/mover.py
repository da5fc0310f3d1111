"""Carries out one move: read, change form, write. The only place where raw becomes packed and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtcd.core import blob as blobs
from kvtcd.core import record as records
from kvtcd.core.errors import Corrupt, KvtcdError, StoreFailed, Truncated
from kvtcd.core.events import Event, Move, Moved, MoveFailed, Reason, Tier
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.record import Envelope
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.ports import Memory, PutRecord

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a move ended; `origin` is what a block that came up said of itself."""

    event: Event
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """The threads that move blocks. A reader waits for `promote` and `fetch`; nobody waits for `demote`."""

    promote: Lane
    demote: Lane
    fetch: Lane

    def all(self) -> tuple[Lane, ...]:
        """Return all of them."""
        return (self.promote, self.demote, self.fetch)


class Mover:
    """Moves between host memory and the disk of the block's tenant.

    Args:
        memory: the host tier.
        put_record: makes a record for the disk tier.
        lanes: threads to work on.
        metrics: told what happened.
        footprint: bytes the disk tier accounts a record with, from lengths of envelope and blob.
    """

    def __init__(
        self,
        memory: Memory,
        put_record: PutRecord,
        lanes: Lanes,
        metrics: Metrics,
        footprint: Callable[[int, int], int],
    ) -> None:
        self._memory, self._put_record = memory, put_record
        self._lanes, self._metrics, self._footprint = lanes, metrics, footprint

    async def demote(self, move: Move, origin: Origin, tenant: Tenant) -> Outcome:
        """Pack a raw host block and store it on disk."""
        try:
            envelope, blob = await self._lanes.demote.run(self._pack, move, origin, tenant)
            assert tenant.writer is not None, "the catalog demotes only to a tier that exists"
            nbytes = self._footprint(len(envelope), len(blob))
            await tenant.writer.put(self._put_record(move.key, envelope, blob), nbytes)
        except KvtcdError as error:
            return self._failed(move, error)
        self._metrics.moved(move.source, move.target, None)
        return Outcome(Moved(move.key, nbytes))

    async def promote(self, move: Move, namespace: Namespace, tenant: Tenant) -> Outcome:
        """Read a block from disk, check it, unpack it into host memory."""
        try:
            envelope, blob = await self._lanes.fetch.run(self._fetch, move.key, tenant)
            await self._lanes.promote.run(self._unpack, move.key, namespace, envelope, blob)
        except KvtcdError as error:
            return self._failed(move, error)
        self._metrics.moved(move.source, move.target, None)
        origin = Origin(
            namespace, envelope.engine_key, envelope.salt, envelope.parent, envelope.first_token,
            envelope.tokens, envelope.raw_bytes, envelope.created,
        )  # fmt: skip
        return Outcome(Moved(move.key, envelope.raw_bytes), origin)

    def _failed(self, move: Move, error: KvtcdError) -> Outcome:
        damaged = isinstance(error, Corrupt)
        if damaged:
            self._metrics.damaged.labels(type(error).__name__).inc()
        self._metrics.moved(move.source, move.target, Reason.DAMAGED if damaged else Reason.FAILED)
        log = _log.debug if isinstance(error, StoreFailed) else _log.warning  # the writer logs store failures
        log("move %s to %s failed: %s", move.source, move.target, error)
        return Outcome(MoveFailed(move.key, damaged=damaged and move.source is Tier.DISK))

    def _pack(self, move: Move, origin: Origin, tenant: Tenant) -> tuple[bytes, bytearray]:
        started = time.perf_counter()
        packed = origin.namespace.codec.encode(
            self._memory.gather(move.key),
            tokens=origin.tokens,
            first_token=origin.first_token,
            after=move.after,
        )
        self._metrics.codec_seconds.labels("pack").observe(time.perf_counter() - started)
        self._metrics.packed.labels(packed.codec.name.lower()).inc()
        if packed.reason:
            self._metrics.lossless_because.labels(packed.reason).inc()
        self._metrics.raw_bytes.inc(origin.raw_bytes)
        self._metrics.blob_bytes.inc(len(packed.blob))
        envelope = Envelope(
            key=move.key, tenant_tag=tenant.keys.tag, key_id=tenant.keys.key_id,
            namespace=origin.namespace.digest, generation=origin.namespace.generation,
            engine_key=origin.engine_key, salt=origin.salt, parent=origin.parent,
            first_token=origin.first_token, tokens=origin.tokens, raw_bytes=origin.raw_bytes,
            blob_bytes=len(packed.blob), created=origin.created, expires=None,
            blob_mac=records.blob_mac(tenant.keys, packed.blob),
        )  # fmt: skip
        return records.seal(tenant.keys, envelope), packed.blob

    def _fetch(self, key: RecordKey, tenant: Tenant) -> tuple[Envelope, memoryview]:
        assert tenant.writer is not None, "the catalog promotes only from a tier that exists"
        found = tenant.writer.environment.read(key)
        if found is None:
            raise Truncated("record", "is missing")
        envelope = records.open_envelope(tenant.keys, key, found[0])
        blob = found[1].data
        records.check_blob(tenant.keys, envelope, blob)
        return envelope, blob

    def _unpack(self, key: RecordKey, namespace: Namespace, envelope: Envelope, data: memoryview) -> None:
        started = time.perf_counter()
        blob = blobs.parse(data)
        layout = namespace.identity.layout
        if (blob.header.tokens, blob.header.raw_bytes) != (envelope.tokens, envelope.raw_bytes):
            raise Truncated("blob", "has another length than its envelope says")
        if blob.header.layout != layout.digest or layout.nbytes(envelope.tokens) != envelope.raw_bytes:
            raise Truncated("blob", "is of another layout than its namespace")
        pieces = self._memory.pieces(key)
        if len(pieces) == 1:
            namespace.codec.decode(blob, pieces[0])
        else:
            out = np.empty(envelope.raw_bytes, dtype=np.uint8)
            namespace.codec.decode(blob, out)
            self._memory.scatter(key, out)
        self._metrics.codec_seconds.labels("unpack").observe(time.perf_counter() - started)
