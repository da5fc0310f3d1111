"""Packs raw blocks of the host: gather, analyze, deflate, seal. On the CPU once the GPU is lost."""

from __future__ import annotations

from collections.abc import Mapping

from kvtcd.core.devices import DeviceName
from kvtcd.core.errors import DeviceLost
from kvtcd.core.events import Move
from kvtcd.engine import drift, steps
from kvtcd.engine.metrics import HURRY, LOST, Metrics
from kvtcd.engine.namespaces import Tenant
from kvtcd.engine.pipeline import Flight
from kvtcd.engine.ports import Codec, Memory, Packed, Scratch
from kvtcd.engine.steps import Origin, Record
from kvtcd.engine.streams import Stages


class Packer:
    """Packs blocks by the codec of their namespace.

    A GPU that is lost takes the process down with it (`serve`); by then what is raw in host memory alone is
    packed losslessly by the CPU, so that it is not lost as well.

    Args:
        memory: the host tier.
        stages: where the stages run.
        elsewhere: where those of codecs run that work on another device, by its name.
        metrics: told what happened.
    """

    def __init__(
        self, memory: Memory, stages: Stages, elsewhere: Mapping[DeviceName, Stages], metrics: Metrics
    ) -> None:
        self._memory, self._stages, self._elsewhere, self._metrics = memory, stages, elsewhere, metrics
        self._lost = False

    async def pack(self, flight: Flight[Scratch], move: Move, origin: Origin, tenant: Tenant) -> Record:
        """Pack one block of the host; `flight`: its way."""
        namespace = origin.namespace
        codec, why = (namespace.lossless, HURRY) if move.lossless else (namespace.codec, None)
        if codec.device == "cpu" or not self._lost:
            try:
                return await self._by(flight, move, origin, tenant, codec=codec, why=why)
            except DeviceLost:
                self._lost = True
        codec = namespace.lossless.on_cpu()
        return await self._by(flight, move, origin, tenant, codec=codec, why=LOST)

    async def _by(
        self, flight: Flight[Scratch], move: Move, origin: Origin, tenant: Tenant,
        *, codec: Codec, why: str | None,
    ) -> Record:  # fmt: skip
        """Pack a block by a codec; `why` it is not that of its namespace, if so."""
        stages = self._elsewhere.get(codec.device, self._stages)
        scratch, pieces = flight.slot, self._memory.pieces(move.key)
        deflated = (
            flight.begin(stages.gather, lambda: steps.gather(pieces, scratch))
            .then(
                stages.analyze,
                lambda raw: codec.analyze(
                    raw, tokens=origin.tokens, first_token=origin.first_token, after=move.after,
                    scratch=scratch,
                ),
            )
            .then(stages.deflate, lambda analyzed: analyzed.deflate())
        )  # fmt: skip
        sealed = deflated.then(stages.seal, lambda packed: steps.seal(packed, move.key, origin, tenant))
        try:
            record = await sealed.end()
        finally:
            drift.notice(origin.namespace, self._metrics)
        self._count(await deflated.end(), origin, why)
        return record

    def _count(self, packed: Packed, origin: Origin, why: str | None) -> None:
        self._metrics.packed.labels(packed.codec.name.lower()).inc()
        if reason := why or packed.reason:
            self._metrics.lossless_because.labels(reason).inc()
        self._metrics.raw_bytes.inc(origin.raw_bytes)
        self._metrics.blob_bytes.inc(len(packed.blob))
