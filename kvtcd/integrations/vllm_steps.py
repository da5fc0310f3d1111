"""What the two halves of the connector tell each other: values that vLLM carries from process to process."""

from __future__ import annotations

from dataclasses import dataclass

from kvtcd.core.keys import EngineKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """What an operator says of a tier.

    Attributes:
        socket: the daemon's address; default ``$KVTCD_SOCKET``, else ``/run/kvtcd/kvtcd.sock``.
        weights: folder of the model's weight files; default: the model that the engine was given.
        adapters: folders of all adapters (LoRA) that are served.
        variant: names what else changes the cache, see `model_files.Settings`.
        full_digest: read every byte of the weights at start.
        salt: parts these chunks from others of the same user.
        retry_seconds: how long a lookup may take before it is a miss.
        timeout_seconds: how long the daemon may take for each chunk or batch.
    """

    socket: str | None = None
    weights: str | None = None
    adapters: tuple[str, ...] = ()
    variant: str = ""
    full_digest: bool = False
    salt: str = ""
    retry_seconds: float = 2.0
    timeout_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(TierOptions):
    """What an operator says in ``kv_connector_extra_config``.

    Attributes:
        timeout_seconds: how long a step may wait for its chunks, and each call to the daemon take.
        chunk_tokens: tokens of a chunk, whole blocks of the engine.
        buffer_bytes: memory for chunks on their way, one half for each way.
    """

    timeout_seconds: float = 5.0
    chunk_tokens: int = 256
    buffer_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Move:
    """One chunk between daemon and pages.

    Attributes:
        key: of the chunk.
        first: position of its first token.
        parent: key of the chunk before it.
        blocks: of the engine that hold it, or a part of it.
        skip: blocks of the chunk before the first of these.
    """

    key: EngineKey
    first: int
    parent: EngineKey | None
    blocks: tuple[int, ...]
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of the engine loads before it computes, and stores when it has computed.

    Attributes:
        loads: chunks to load.
        stores: chunks that are complete when the step ends.
        failures: how many steps are known to have failed to load something when this one was planned.
        released: finished requests whose blocks are the engine's again when this step ends.
    """

    loads: tuple[Move, ...] = ()
    stores: tuple[Move, ...] = ()
    failures: int = 0
    released: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """Chunks that were to be stored, and are on their way no more; `there`: those that the daemon has."""

    keys: frozenset[EngineKey] = frozenset()
    there: frozenset[EngineKey] = frozenset()

    def __or__(self, other: Sent) -> Sent:
        """Return both together."""
        return Sent(self.keys | other.keys, self.there | other.there)


@dataclass(frozen=True, slots=True)
class Cache:
    """What the worker half says of its pages at start.

    Attributes:
        identity: JSON form of the `Identity` of its chunks.
        load_slots: chunks that a step can load.
    """

    identity: dict[str, object]
    load_slots: int
