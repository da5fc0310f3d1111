"""The only place that names concrete classes: puts the cache of a daemon together, and takes it down."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvtcd import custody, machine, shared_store
from kvtcd.codec import choose
from kvtcd.codec.ports import Reason
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.config import Config, Credentials, load_credentials, load_policies
from kvtcd.core.catalog import Catalog
from kvtcd.core.cipher import TAG_BYTES
from kvtcd.core.devices import DeviceName
from kvtcd.core.gpus import Gpus
from kvtcd.core.identity import Identity
from kvtcd.core.keys import TenantKeys
from kvtcd.core.policy import FADING, CodecChoice, Policy
from kvtcd.core.record import MAX_ENVELOPE_BYTES
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.engine.cuda import Lost, copies_on_each, on_each
from kvtcd.engine.devices import Devices
from kvtcd.engine.driver import Driver
from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover, Tracer
from kvtcd.engine.namespaces import Registry
from kvtcd.engine.ports import Codec
from kvtcd.engine.recorder import Recorder
from kvtcd.engine.remote.build import Settings, remote_tier
from kvtcd.engine.remote.tier import RemoteTier
from kvtcd.engine.service import Service
from kvtcd.engine.streams import Gpu, Stages
from kvtcd.engine.tenancy import Tenancy
from kvtcd.tiers.disk import Environment, Put, footprint, require_hardened
from kvtcd.tiers.memory import GRANULE, HostMemory
from kvtcd.tiers.pinning import Pinned, pin
from kvtcd.tiers.state import StateDirectory
from kvtcd.tiers.state_files import StateFiles

if TYPE_CHECKING:
    from kvtcd.api.tracing import Tracing

_log = logging.getLogger(__name__)
FLUSH_SHARE = 0.5
"""Share of ``daemon.stop_seconds`` for writing what only the host has."""


@asynccontextmanager
async def service(
    config: Config,
    record: Path | None = None,
    lost: Lost = lambda _: None,
    *,
    master: bytes | None = None,
    remote: bytes | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Service]:
    """Run a daemon without its HTTP server; leaving stops it within ``daemon.stop_seconds``.

    Args:
        config: what holds for it.
        record: write down in this file what is asked of it.
        lost: told, on some thread, that the GPU has failed; nothing is packed or unpacked any more.
        master: the master key, if it is not kept in the state directory.
        remote: what the remote tier is entered by, if no file says so.
        tracer: told of moves.

    Raises:
        ConfigError: a policy file, the master key, the state directory, the recording, or what is asked of
            this machine, cannot be had; or nothing that is stored is under that key.
        AlreadyRunning: another process holds the state directory.
    """
    policies = await asyncio.to_thread(load_policies, config.policies)
    await asyncio.to_thread(machine.verify, config, policies)  # before anything is made
    os.umask(0o077)
    torch.set_num_threads(config.codec.threads or max(1, (os.cpu_count() or 1) // 2))
    state = await asyncio.to_thread(StateDirectory, config.daemon.state)
    try:
        key = await asyncio.to_thread(state.master_key, master)
        begun = await asyncio.to_thread(custody.settle, state, key) if config.disk.capacity else ()
        for doubt in (*begun, *await asyncio.to_thread(machine.doubts, config)):
            _log.warning(doubt)
        built, tags, pinned = await asyncio.to_thread(
            _assemble, config, state, key, record, lost, policies=policies, tracer=tracer, entry=remote
        )
        try:
            await built.recover(tags)
            foreign, unread = built.conditions.tags("other-key"), built.conditions.tags("left-out")
            if not built.ready:
                why = await asyncio.to_thread(custody.unread, state, unread)
                custody.require_fitting(state, (), foreign, why)
            for tag in foreign:
                _log.warning(custody.left_alone(await asyncio.to_thread(custody.described, state, tag)))
                built.metrics.foreign.inc()
            for tag in built.conditions.tags("set-aside"):
                _log.warning("%s", custody.set_aside(state.tenant(tag)))
            yield built
        finally:
            await built.close(asyncio.get_running_loop().time() + config.daemon.stop_seconds * FLUSH_SHARE)
            if pinned:
                await asyncio.to_thread(pinned.close)
    finally:
        await asyncio.to_thread(state.close)


@asynccontextmanager
async def tracing(config: Config) -> AsyncIterator[Tracing | None]:
    """Trace while it is entered, if that is configured; its spans are sent in the end.

    Raises:
        ConfigError: what it needs is not installed.
    """
    kind = _tracing(config)
    if kind is None:
        yield None
        return
    tracer = await asyncio.to_thread(kind.to, config.tracing.endpoint, config.tracing.share)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def _tracing(config: Config) -> type[Tracing] | None:
    """Return what traces, None if nothing is to."""
    if not config.tracing.endpoint:
        return None
    try:
        from kvtcd.api.tracing import Tracing  # noqa: PLC0415 - an extra, loaded where it is asked for
    except ModuleNotFoundError as error:
        why = f"needs {error.name}, which is not installed: pip install 'kvtcd[otel]'"
        raise config.fault("tracing.endpoint", why) from None
    return Tracing


@dataclass(frozen=True, slots=True)
class Examined:
    """What a start would find.

    Attributes:
        policies: in order.
        held: another process has the state directory now.
        notes: what is worth knowing, and no fault.
    """

    policies: tuple[Policy, ...]
    held: bool
    notes: tuple[str, ...]


def examine(config: Config, *, master: bytes | None, remote: bytes | None) -> Examined:
    """Refuse what `service` and `tracing` would; nothing is made or held.

    Raises:
        ConfigError, Unavailable: see there.
    """
    policies = load_policies(config.policies)
    machine.verify(config, policies)
    _tracing(config)
    state = StateFiles(config.daemon.state)
    held = state.examine()
    key, notes = state.known_key(master), machine.doubts(config)
    notes += tuple(Devices(*machine.gpus(config, policies)).unmet(policies))
    if config.disk.capacity:
        require_hardened()
        if key and not held:
            notes += custody.examine(state, key)
    if config.remote.url:
        asyncio.run(_entered(config, load_credentials(config.remote.credentials, remote)))
        shared_store.ledger(state)
    return Examined(policies, held, notes)


async def _entered(config: Config, entry: Credentials) -> None:
    """Make a client of the store, which belongs to a loop, and ask it nothing."""
    await shared_store.client(config, entry).close()


def _assemble(
    config: Config,
    state: StateDirectory,
    master: bytes,
    record: Path | None,
    lost: Lost,
    *,
    policies: tuple[Policy, ...],
    tracer: Tracer | None,
    entry: bytes | None,
) -> tuple[Service, list[str], Pinned | None]:
    """Put the rooms together; return the service, the tenants found on disk, and host memory if pinned."""
    memory = machine.host_memory(config)
    metrics, registry = Metrics(), Registry()
    for reason in Reason:
        metrics.lossless_because.labels(reason)
    lane = Lane("profiles")
    sightings = Sightings(FADING * policies[-1].evict.half_life)
    residency = Residency()
    memories = machine.device_memories(config, policies)
    accelerators = machine.accelerators(
        config, policies, residency,
        lambda why: metrics.on_cpu.labels(why).inc(), lambda why: metrics.unreplayed.labels(why).inc(),
    )  # fmt: skip
    by_device: dict[DeviceName, Stages] = {}
    if accelerators:
        by_device = on_each({each.name: each.device for each in accelerators.values()}, lost)
    stages = next(iter(by_device.values())) if by_device else on_threads()
    copies = copies_on_each({name: each.device for name, each in memories.items()}, lost)
    used = [each.device for each in memories.values()] + [each.device for each in accelerators.values()]
    if not used and config.gpu.regions and torch.cuda.is_available():
        used = [torch.device("cuda", config.gpu.device)]
    pinned = pin(memory.chunks, used[0]) if used else None
    metrics.pinned.set(pinned.share if pinned else 0)
    tiers = shelves(
        policies[-1], sightings, host=memory.capacity, disk=config.disk.capacity, granule=GRANULE,
        tenants=config.tenants.share(),
    )  # fmt: skip
    capacities = {name: each.capacity for name, each in memories.items()}
    catalog = Catalog(
        tiers, lambda raw: footprint(MAX_ENVELOPE_BYTES, choose.bound(raw) + TAG_BYTES), sightings,
        gpus=Gpus.of(capacities, sightings, granule=GRANULE),
    )  # fmt: skip
    mover = Mover(
        memory=memory,
        put_record=Put,
        stages=stages,
        elsewhere=by_device,
        scratch=HeapScratch,
        metrics=metrics,
        footprint=footprint,
        gpus={name: Gpu(each, copies[name]) for name, each in memories.items()},
        tracer=tracer,
    )
    driver = Driver(catalog, memory, mover, registry, metrics, gpus=memories)
    profiles = ProfileFolder(config.codec.profiles, residency)

    def codec(identity: Identity, choice: CodecChoice) -> Codec:
        where = choice.device or machine.codec_device(config)
        return choose.codec_for(identity, choice, profiles, accelerators.get(where))

    def open_environment(tag: str) -> Environment:
        return Environment(state.tenant(tag), quota=config.disk.capacity)

    tenancy = Tenancy(
        driver, registry, lane=lane, metrics=metrics, policies=policies, master=master,
        codecs=codec, open_environment=open_environment if config.disk.capacity else None,
        encrypt=config.disk.encrypt, devices=Devices(accelerators, memories),
    )  # fmt: skip
    remote = _remote(
        config, state, entry, master=master, driver=driver, memory=memory, registry=registry, metrics=metrics,
        profiles=profiles, lane=lane,
    )  # fmt: skip
    if remote:
        mover.packed, mover.passed = remote.packed, remote.passed
        mover.missing = remote.profiles.fetch
    streams = dict.fromkeys(stream for each in (stages, *by_device.values()) for stream in each.streams())
    lanes, recorder = [*streams, *(copy.stream for copy in copies.values()), lane], None
    if record:
        lanes.append(writing := Lane("record"))
        recorder = Recorder(record, writing, metrics)
    service = Service(
        driver=driver, memory=memory, tenancy=tenancy, lanes=lanes, metrics=metrics, recorder=recorder,
        remote=remote,
    )  # fmt: skip
    return service, custody.in_use(state, master) if config.disk.capacity else [], pinned


def _remote(
    config: Config, state: StateDirectory, entry: bytes | None, *, master: bytes, driver: Driver,
    memory: HostMemory, registry: Registry, metrics: Metrics, profiles: ProfileFolder,
    lane: Lane,
) -> RemoteTier | None:  # fmt: skip
    """Return the tier that is shared with other daemons, None without one."""
    if not config.remote.url:
        return None
    said = config.remote
    store = shared_store.client(config, load_credentials(said.credentials, entry))
    settings = Settings(
        timeout=said.timeout, look_s=said.look, queue=said.queue, ttl=said.ttl_s,
        present_s=said.believe_present, absent_s=said.believe_absent, encrypt=said.encrypt,
        profile=said.profile,
    )  # fmt: skip
    return remote_tier(
        store, settings, driver=driver, memory=memory, registry=registry, metrics=metrics,
        profiles=profiles, profile_lane=lane, derive=partial(TenantKeys.derive, master),
        ledger=shared_store.ledger(state), save=state.note_remote,
    )  # fmt: skip
