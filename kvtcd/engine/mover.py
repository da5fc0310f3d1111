"""Carries out one move. The only place where blocks change form: by `packing` and `unpacking`.

Every way is a pipeline, so that the stages of successive blocks overlap::

    up      read | check | inflate | synthesize | scatter     (scatter: into host memory)
    down    gather | analyze | deflate | seal | commit
    copy    to or from a GPU, each of them by itself

A blob that is packed already moves as it is: what lies between its ends is left out, but never its check. The
last stage of a way to disk is the writer's, which commits several records at once; by then a block has left
the ring, since all that is left of it is its record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.devices import DeviceName, GpuName
from kvtcd.core.errors import KvtcdError, UnknownProfile
from kvtcd.core.events import Event, Move, Moved
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Form, Place
from kvtcd.core.reason import Reason
from kvtcd.engine import steps
from kvtcd.engine.failures import Failures
from kvtcd.engine.metrics import LANDED, Metrics
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.packing import Packer
from kvtcd.engine.pipeline import Flight, Pipeline, Step
from kvtcd.engine.ports import DeviceMemory, Inflated, Memory, PutRecord, Scratch
from kvtcd.engine.steps import Origin, Record
from kvtcd.engine.streams import Gpu, Stages, Watch
from kvtcd.engine.timeline import Span
from kvtcd.engine.unpacking import Landing, Packed, Unpacked, Unpacker

DEPTH = 3
"""Blocks in flight either way: one in its slowest stage, one on either side of it."""
_NOWHERE_ELSE: Mapping[DeviceName, Stages] = MappingProxyType({})
_NONE: Mapping[GpuName, Gpu] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a move ended; `origin` is what a block that was moved says of itself, if that is news."""

    event: Event
    origin: Origin | None = None


class Tracer(Protocol):
    """Told of moves and their stages while they happen."""

    async def move(self, move: Move, ending: Awaitable[Outcome]) -> Outcome:
        """Wait for a move to end, and return how."""

    def stage(self, span: Span) -> None:
        """Note the end of a stage; on any thread, in the context of its move."""


class Mover:
    """Moves between the memories and the disk of the block's tenant.

    Args:
        memory: the host tier.
        gpus: those that hold blocks, by device.
        put_record: makes a record for the disk tier.
        stages: where the stages run.
        elsewhere: where those of codecs run that work on another device, by its name.
        scratch: makes the memory of one block in flight.
        metrics: told what happened.
        footprint: bytes the disk tier accounts a record with, from lengths of envelope and blob.
        observers: told of every stage of every block.
        tracer: told of that and of every move; None: nobody is.

    Attributes:
        packed: told of each record that a block was packed into.
        passed: told of each that was read and proved sound; its bytes are gone thereafter.
        missing: told of a profile that a blob needs and that is not here; tells whether it is now, or raises
            `RemoteFailed` where it may be later.
    """

    def __init__(
        self,
        *,
        memory: Memory,
        put_record: PutRecord,
        stages: Stages,
        elsewhere: Mapping[DeviceName, Stages] = _NOWHERE_ELSE,
        scratch: Callable[[], Scratch],
        metrics: Metrics,
        footprint: Callable[[int, int], int],
        gpus: Mapping[GpuName, Gpu] = _NONE,
        observers: Sequence[Callable[[Span], None]] = (),
        tracer: Tracer | None = None,
    ) -> None:
        self._memory, self._gpus, self._put_record = memory, gpus, put_record
        self._metrics, self._footprint, self._tracer = metrics, footprint, tracer
        self.packed: Callable[[RecordKey, Record, Origin, Tenant], None] = lambda *_: None
        self.passed: Callable[[RecordKey, Record, Origin, Tenant], None] = lambda *_: None
        self.missing: Callable[[bytes], Awaitable[bool]] = _nowhere
        self._failures = Failures(metrics)
        told = (metrics.staged, *observers, *([tracer.stage] if tracer else []))
        self._stages = stages
        self._packer = Packer(memory, stages, elsewhere, metrics)
        self._unpacker = Unpacker(memory, stages, elsewhere)
        self._up = Pipeline("promote", [scratch() for _ in range(DEPTH)], told)
        self._down = Pipeline("demote", [scratch() for _ in range(DEPTH)], told)
        self._copies = {device: Pipeline("copy", [scratch() for _ in range(DEPTH)], told) for device in gpus}

    async def move(self, move: Move, namespace: Namespace, tenant: Tenant, origin: Origin | None) -> Outcome:
        """Carry out one move; `origin` is known of every block with a copy in memory."""
        ending = self._moved(move, namespace, tenant, origin)
        return await (self._tracer.move(move, ending) if self._tracer else ending)

    async def _moved(
        self, move: Move, namespace: Namespace, tenant: Tenant, origin: Origin | None
    ) -> Outcome:
        try:
            outcome = await self._carry_out(move, namespace, tenant, origin)
        except KvtcdError as error:
            return Outcome(self._failures.of_move(move, namespace, error))
        self._metrics.moved(move.source, move.target, None)
        return outcome

    async def _carry_out(
        self, move: Move, namespace: Namespace, tenant: Tenant, origin: Origin | None
    ) -> Outcome:
        if Place.GPU in (move.source, move.target):
            return await self._copy(move)
        if move.target is Place.HOST:
            return await self._promote(move, namespace, tenant, origin)
        if move.source is Place.DISK:
            return await self._load(move, namespace, tenant)
        assert origin is not None, "a block in memory has an origin"
        if move.source is Place.PACKED:
            return await self._store(move, origin, tenant)
        return await self._demote(move, origin, tenant)

    async def _demote(self, move: Move, origin: Origin, tenant: Tenant) -> Outcome:
        """Pack a raw host block, and leave it on the host or store it on disk."""
        async with self._down.enter() as flight:
            record = await self._packer.pack(flight, move, origin, tenant)
            self.packed(move.key, record, origin, tenant)
            watch = self._down.watch("commit", flight.number)
            if move.target is Place.PACKED:
                return await self._settle_in(flight, move.key, origin, record)
        return await self._commit(move.key, record, tenant, watch)

    async def _settle_in(
        self, flight: Flight[Scratch], key: RecordKey, origin: Origin, record: Record
    ) -> Outcome:
        """Put a blob into host memory; its envelope stays with its origin."""
        blob = np.frombuffer(record.blob, dtype=np.uint8)
        self._memory.allocate(key, blob.size, Form.PACKED)
        pieces = self._memory.pieces(key, Form.PACKED)
        await flight.begin(self._stages.seal, lambda: steps.scatter(blob, pieces)).end()
        return Outcome(Moved(key, blob.size), replace(origin, envelope=bytes(record.envelope)))

    async def _commit(self, key: RecordKey, record: Record, tenant: Tenant, watch: Watch | None) -> Outcome:
        assert tenant.writer is not None, "the catalog demotes only to a tier that exists"
        nbytes = self._footprint(len(record.envelope), len(record.blob))
        await tenant.writer.put(self._put_record(key, *record), nbytes, watch)
        return Outcome(Moved(key, nbytes))

    async def _store(self, move: Move, origin: Origin, tenant: Tenant) -> Outcome:
        """Store a block on disk that is packed already."""
        assert origin.envelope is not None, "a packed copy in memory has an envelope"
        async with self._down.enter() as flight:
            sealed, pieces = origin.envelope, self._memory.pieces(move.key, Form.PACKED)

            def gather() -> Record:
                record = Record(sealed, np.concatenate(pieces))
                steps.verify(record, move.key, tenant)
                return record

            record = await flight.begin(self._stages.seal, gather).end()
            watch = self._down.watch("commit", flight.number)
        return await self._commit(move.key, record, tenant, watch)

    async def _load(self, move: Move, namespace: Namespace, tenant: Tenant) -> Outcome:
        """Bring a blob up from disk as it is."""
        stages, key = self._stages, move.key
        async with self._up.enter() as flight:
            read = flight.begin(stages.read, lambda: steps.read(key, tenant, flight.slot))
            envelope = await read.then(stages.check, lambda found: steps.verify(found, key, tenant)).end()
            origin, record = Origin.of(namespace, envelope), await read.end()
            self.passed(key, record, origin, tenant)
            return await self._settle_in(flight, key, origin, record)

    async def _promote(
        self, move: Move, namespace: Namespace, tenant: Tenant, origin: Origin | None
    ) -> Outcome:
        """Unpack a block into its place in host memory."""
        pieces = self._memory.pieces(move.key)

        def land(inflated: Step[Inflated], stages: Stages, scratch: Scratch) -> Step[None]:
            return inflated.then(
                stages.synthesize, lambda found: steps.synthesize(found, pieces, scratch)
            ).then(stages.scatter, lambda whole: steps.scatter(whole, pieces))

        unpacked = await self._unpacked(Packed(move.key, move.source, namespace, tenant, origin), land)
        return Outcome(Moved(move.key, unpacked.raw_bytes), unpacked.origin)

    async def unpack(self, block: Packed, out: DeviceBytes) -> Reason | None:
        """Unpack a block into memory on the GPU where its codec works; return why it is not there, if so."""

        def land(inflated: Step[Inflated], stages: Stages, _: Scratch) -> Step[None]:
            return inflated.then(stages.synthesize, lambda found: found.synthesize(out))

        return await self._landed(block.key, block.namespace, block.source, self._unpacked(block, land))

    async def deliver(
        self, key: RecordKey, namespace: Namespace, device: GpuName, out: DeviceBytes
    ) -> Reason | None:
        """Copy a block to memory on the GPU that holds it; return why it is not there, if so."""
        copying = self._on(device, lambda memory: memory.deliver(key, out))
        return await self._landed(key, namespace, Place.GPU, copying)

    async def _landed(
        self, key: RecordKey, namespace: Namespace, source: Place, landing: Awaitable[object]
    ) -> Reason | None:
        reason: Reason | None = None
        try:
            await landing
        except KvtcdError as error:
            reason = self._failures.of_landing(key, namespace, source, error)
        self._metrics.straight.labels(source, reason or LANDED).inc()
        return reason

    async def _unpacked(self, block: Packed, landing: Landing) -> Unpacked:
        """Unpack a block, with a profile from elsewhere if it is not here."""
        try:
            return await self._up_with(block, landing)
        except UnknownProfile as error:
            if not await self.missing(error.digest):
                raise
        return await self._up_with(block, landing)

    async def _up_with(self, block: Packed, landing: Landing) -> Unpacked:
        async with self._up.enter() as flight:
            unpacked = await self._unpacker.unpack(flight, block, landing)
            self.passed(block.key, unpacked.record, unpacked.origin, block.tenant)
        return unpacked

    async def _copy(self, move: Move) -> Outcome:
        """Copy a raw block between host and GPU."""
        assert move.device is not None, "one of its places is on a GPU"
        key, pieces = move.key, self._memory.pieces(move.key)

        def carry(memory: DeviceMemory) -> None:
            (memory.upload if move.target is Place.GPU else memory.download)(key, pieces)

        await self._on(move.device, carry)
        return Outcome(Moved(key, sum(piece.size for piece in pieces)))

    async def _on(self, device: GpuName, copy: Callable[[DeviceMemory], None]) -> None:
        """Copy a block from or to a GPU; no other GPU waits for that."""
        gpu = self._gpus[device]
        async with self._copies[device].enter() as flight:
            await flight.begin(gpu.copy, lambda: copy(gpu.memory)).end()


async def _nowhere(_: bytes) -> bool:
    """Know of no other place for profiles."""
    return False
