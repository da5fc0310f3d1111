"""A codec that shrinks by a known factor, and a service around it: small, exact, fast."""

from __future__ import annotations

import asyncio
import threading
import zlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from support.patience import PATIENCE_S
from support.pipelines import engine_stages, stream, write
from support.twin_memory import TwinMemory

from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core import blob as blobs
from kvtcd.core.blob import CodecId, Header, Kind, Run
from kvtcd.core.catalog import Catalog
from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.drift import Drift
from kvtcd.core.errors import BadField
from kvtcd.core.gpus import Gpus
from kvtcd.core.identity import Identity, Rope, RopeKind
from kvtcd.core.keys import TenantKeys
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.core.policy import Policy
from kvtcd.core.record import MAX_ENVELOPE_BYTES
from kvtcd.core.remote.ledger import Ledger
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.engine.devices import Devices
from kvtcd.engine.driver import Driver
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover
from kvtcd.engine.namespaces import Registry
from kvtcd.engine.recorder import Recorder
from kvtcd.engine.remote.build import Settings, remote_tier
from kvtcd.engine.service import Service
from kvtcd.engine.streams import Gpu, Stage
from kvtcd.engine.tenancy import Tenancy
from kvtcd.tiers.device import DeviceMemory
from kvtcd.tiers.disk import Environment, Put, footprint
from kvtcd.tiers.memory import GRANULE, HostMemory
from kvtcd.tiers.state import StateDirectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from kvtcd.engine.mover import Tracer
    from kvtcd.engine.ports import CodecFactory, RemoteStore

LAYOUT = kv_layout(layers=2, kv_heads=2, head_dim=32, dtype=Dtype.BF16)
BLOCK_TOKENS = 16
IDENTITY = Identity(
    engine="test",
    hash_scheme="kvtcd-chain-v1",
    model="toy",
    weights="ab" * 32,
    layout=LAYOUT,
    rope=Rope(RopeKind.DEFAULT, 10_000.0, 32),
    block_tokens=BLOCK_TOKENS,
)
BLOCK_BYTES = LAYOUT.nbytes(BLOCK_TOKENS)


def patient(**changes: object) -> Settings:
    """Return settings of a remote tier by which nothing depends on how fast the machine is."""
    return Settings(**({"timeout": PATIENCE_S, "look_s": PATIENCE_S, "absent_s": PATIENCE_S} | changes))


def soon(seconds: float = PATIENCE_S) -> float:
    """Return a deadline: a time of the running loop's clock."""
    return asyncio.get_running_loop().time() + seconds


def block(seed: int, tokens: int = BLOCK_TOKENS) -> bytes:
    """Return the raw bytes of a block that zlib shrinks."""
    return np.random.default_rng(seed).integers(0, 4, LAYOUT.nbytes(tokens), dtype=np.uint8).tobytes()


@dataclass(frozen=True)
class ToyPacked:
    """What `ToyCodec` returns."""

    blob: bytearray
    codec: CodecId = CodecId.LOSSLESS
    reason: str | None = None


@dataclass(frozen=True)
class _Analyzed:
    deflate: Callable[[], ToyPacked]


@dataclass(frozen=True)
class _Inflated:
    data: bytearray
    kind: str
    foreign: TwinMemory | None

    def synthesize(self, out) -> None:
        if isinstance(out, DeviceBytes):
            out = self.foreign.tensor(out).numpy()
        if len(self.data) != len(out):
            raise BadField("blob", "another length")
        write(self.kind, np.frombuffer(self.data, np.uint8), out)


@dataclass
class ToyCodec:
    """Zlib in a blob's clothes. `after` of every encoding is noted; `fail` makes it break.

    `kind`, as in `support.pipelines`, says who writes the blocks; `foreign`, where on a GPU they may go, too.
    """

    identity: Identity
    name: str = "toy"
    reason: str | None = None
    profile: str | None = None
    expected_kl: float | None = None
    drift: Drift | None = None
    device: str = "cuda"
    afters: dict[bytes, int] = field(default_factory=dict)
    fail: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    kind: str = "threads"
    foreign: TwinMemory | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def gpu(self) -> int | None:
        return self.foreign.gpu if self.foreign else None

    def on_cpu(self) -> ToyCodec:
        return self

    def analyze(self, raw, *, tokens, first_token, after, scratch) -> _Analyzed:  # noqa: ARG002 - as in `Codec`
        body = bytes(raw)
        return _Analyzed(lambda: self.encode(body, tokens=tokens, first_token=first_token, after=after))

    def inflate(self, blob, scratch) -> _Inflated:  # noqa: ARG002 - as in `Codec`
        data = zlib.decompressobj().decompress(blob.payload(blob.sections[0]))
        return _Inflated(bytearray(data), self.kind, self.foreign)

    def encode(self, body, *, tokens, first_token, after) -> ToyPacked:
        self.gate.wait(PATIENCE_S)
        if self.fail:
            raise self.fail
        self.afters[body] = after
        packed = zlib.compress(body, 1)
        header = Header(
            CodecId.LOSSLESS, 1, LAYOUT.dtype, self.identity.layout.digest, tokens, len(body), first_token
        )
        return ToyPacked(blobs.assemble(header, [Run(Kind.RAW, 255, 0, 0, tokens, len(packed), data=packed)]))


@dataclass
class ToyService:
    """A service and what lies below it."""

    service: Service
    catalog: Catalog
    memory: HostMemory
    codecs: list[ToyCodec]
    gpus: dict[str, DeviceMemory]


def _master_key(state: StateDirectory) -> bytes:
    """Return the same key in every run: whose record keys meet in a sketch is no matter of luck then."""
    path = state.path / "master.key"
    if not path.exists():
        path.touch(0o600)
        path.write_bytes(bytes(range(32)))
    return state.master_key()


def capacities(gpu: int | Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each GPU; a number is that of the only one."""
    return ({"cuda:0": gpu} if gpu else {}) if isinstance(gpu, int) else dict(gpu)


@asynccontextmanager
async def toy_service(
    path: Path,
    *,
    host: int = 64 * BLOCK_BYTES,
    disk: int = 1 << 30,
    policy: Policy | None = None,
    close_s: float = PATIENCE_S,
    record: Path | None = None,
    kind: str = "threads",
    gpu: int | Mapping[str, int] = 0,
    codec: CodecFactory | None = None,
    foreign: TwinMemory | None = None,
    encrypt: bool = False,
    tracer: Tracer | None = None,
    remote: RemoteStore | None = None,
    settings: Settings | None = None,
    folder: ProfileFolder | None = None,
) -> AsyncIterator[ToyService]:
    """Run a service with a real disk tier in `path`, and toy codecs or those of a factory.

    It recovers what lies there. With a `remote` store it has a tier there; all share one master key. Blocks
    move on stages of a kind, as in `support.pipelines`; the GPU tier lies in plain memory, and reaches that
    of readers by `foreign`.
    """
    state = await asyncio.to_thread(StateDirectory, path)
    master = await asyncio.to_thread(_master_key, state)
    policy = policy or Policy("toy")
    memory, metrics, registry = HostMemory(host), Metrics(), Registry()
    sightings = Sightings(width=1 << 10)
    memories = {
        name: DeviceMemory(size, torch.device("cpu"), (foreign or TwinMemory()).tensor)
        for name, size in capacities(gpu).items()
    }
    gpus = {name: Gpu(each, Stage("copy", stream(kind, f"copy-{name}"))) for name, each in memories.items()}
    tiers = shelves(policy, sightings, host=memory.capacity, disk=disk, granule=GRANULE)
    stages, lane = engine_stages(kind), Lane("profiles")
    catalog = Catalog(
        tiers, lambda raw: footprint(MAX_ENVELOPE_BYTES, raw + 4096), sightings,
        gpus=Gpus.of(capacities(gpu), sightings, granule=GRANULE),
    )  # fmt: skip
    mover = Mover(
        memory=memory,
        put_record=Put,
        stages=stages,
        scratch=HeapScratch,
        metrics=metrics,
        footprint=footprint,
        gpus=gpus,
        tracer=tracer,
    )
    driver = Driver(catalog, memory, mover, registry, metrics, gpus=memories)
    codecs: list[ToyCodec] = []

    def toy(identity, choice) -> ToyCodec:
        if choice.name == "lossless":
            return ToyCodec(identity, name="hurry")
        codecs.append(ToyCodec(identity, kind=kind))
        return codecs[-1]

    tenancy = Tenancy(
        driver,
        registry,
        lane=lane,
        metrics=metrics,
        policies=(policy,),
        master=master,
        codecs=codec or toy,
        open_environment=(lambda tag: Environment(state.tenant(tag), quota=disk)) if disk else None,
        encrypt=encrypt,
        devices=Devices(holding=memories),
    )
    tier = None
    if remote is not None:
        kept = await asyncio.to_thread(state.remote)
        tier = remote_tier(
            remote, settings or patient(), driver=driver, memory=memory, registry=registry,
            metrics=metrics, profiles=folder or ProfileFolder(path / "profiles"), profile_lane=lane,
            derive=lambda tenant: TenantKeys.derive(master, tenant),
            ledger=Ledger.from_bytes(kept) if kept else Ledger(), save=state.note_remote, luck=lambda: 0.5,
        )  # fmt: skip
        mover.packed, mover.passed = tier.packed, tier.passed
        mover.missing = tier.profiles.fetch
    lanes, recorder = [*stages.streams(), *(gpu.copy.stream for gpu in gpus.values()), lane], None
    if record:
        lanes.append(Lane("record"))
        recorder = await asyncio.to_thread(Recorder, record, lanes[-1], metrics)
    service = Service(
        driver=driver, memory=memory, tenancy=tenancy, lanes=lanes, metrics=metrics, recorder=recorder,
        remote=tier,
    )  # fmt: skip
    try:
        await service.recover(await asyncio.to_thread(lambda: list(state.tenants())))
        yield ToyService(service, catalog, memory, codecs, memories)
    finally:
        await service.close(asyncio.get_running_loop().time() + close_s)
        await asyncio.to_thread(state.close)
