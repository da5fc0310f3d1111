"""Unpacks blocks: read, check, inflate, and synthesize to where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtcd.core.devices import DeviceName
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Form, Place
from kvtcd.engine import steps
from kvtcd.engine.namespaces import Namespace, Tenant
from kvtcd.engine.pipeline import Flight, Step
from kvtcd.engine.ports import Inflated, Memory, Scratch
from kvtcd.engine.steps import Origin, Record
from kvtcd.engine.streams import Stages

Landing = Callable[[Step[Inflated], Stages, Scratch], Step[Any]]
"""The rest of a block's way, behind the entropy half of its codec."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed block.

    Attributes:
        source: the place of its copy, which stays there meanwhile.
        origin: known of every block with a copy in memory.
    """

    key: RecordKey
    source: Place
    namespace: Namespace
    tenant: Tenant
    origin: Origin | None


class Unpacked(NamedTuple):
    """What a block that was unpacked says of itself, and its record, whose bytes are gone with the flight."""

    raw_bytes: int
    origin: Origin
    record: Record


class Unpacker:
    """Unpacks blocks by the codec of their namespace.

    Args:
        memory: the host tier.
        stages: where the stages run.
        elsewhere: where those of codecs run that work on another device, by its name.
    """

    def __init__(self, memory: Memory, stages: Stages, elsewhere: Mapping[DeviceName, Stages]) -> None:
        self._memory, self._stages, self._elsewhere = memory, stages, elsewhere

    async def unpack(self, flight: Flight[Scratch], block: Packed, landing: Landing) -> Unpacked:
        """Check a block in full, and only then decode it; return when it has landed.

        Raises:
            Corrupt: it is not what was stored.
            UnknownProfile: it was made with a profile that is not here.
        """
        codec, scratch = block.namespace.codec, flight.slot
        stages, layout = self._elsewhere.get(codec.device, self._stages), block.namespace.identity.layout
        fetch = self._fetch(block)
        fetched = flight.begin(stages.read, lambda: fetch(scratch))
        checked = fetched.then(
            stages.check, lambda found: steps.check(found, block.key, block.tenant, layout, scratch)
        )
        inflated = checked.then(stages.inflate, lambda record: codec.inflate(record.blob, scratch))
        await landing(inflated, stages, scratch).end()
        envelope = (await checked.end()).envelope
        origin = block.origin if block.source is Place.PACKED else None
        return Unpacked(
            envelope.raw_bytes, origin or Origin.of(block.namespace, envelope), await fetched.end()
        )

    def _fetch(self, block: Packed) -> Callable[[Scratch], Record]:
        """Return what reads a record."""
        if block.source is Place.DISK:
            return lambda scratch: steps.read(block.key, block.tenant, scratch)
        assert block.origin is not None, "a block in memory has an origin"
        assert block.origin.envelope is not None, "a packed copy in memory has an envelope"
        envelope, pieces = block.origin.envelope, self._memory.pieces(block.key, Form.PACKED)
        return lambda scratch: Record(envelope, steps.gather(pieces, scratch))
