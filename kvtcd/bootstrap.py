"""The only place that names concrete classes: puts a daemon together, runs it, takes it down."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from sdnotify import SystemdNotifier

from kvtcd.api.app import create_app, start
from kvtcd.api.limits import Limits
from kvtcd.codec import choose, nvcomp
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.staged import Accelerator
from kvtcd.config import Config, load_policies, show_bytes
from kvtcd.core.catalog import Catalog
from kvtcd.core.errors import ConfigError, DeviceLost
from kvtcd.core.identity import Identity
from kvtcd.core.policy import FADING, CodecChoice
from kvtcd.core.record import MAX_ENVELOPE_BYTES
from kvtcd.core.shelf import shelves
from kvtcd.core.sightings import Sightings
from kvtcd.engine.cuda import Lost, copies_on_cuda, on_cuda
from kvtcd.engine.driver import Driver
from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import Mover
from kvtcd.engine.namespaces import Registry
from kvtcd.engine.ports import Codec
from kvtcd.engine.recorder import Recorder
from kvtcd.engine.service import Service
from kvtcd.engine.tenancy import Tenancy
from kvtcd.tiers.device import DeviceMemory
from kvtcd.tiers.disk import Environment, Put, footprint
from kvtcd.tiers.memory import GRANULE, HostMemory
from kvtcd.tiers.pinning import Pinned, pin
from kvtcd.tiers.state import StateDirectory

_log = logging.getLogger(__name__)
DRAIN_SHARE, FLUSH_SHARE = 0.3, 0.5
"""Shares of ``daemon.stop_seconds`` for ending requests, and then for writing what only the host has."""
AUTO_GPU = 50
"""The part of a device that ``gpu.capacity = "auto"`` takes is one in so many."""


@asynccontextmanager
async def service(
    config: Config, record: Path | None = None, lost: Lost = lambda _: None
) -> AsyncIterator[Service]:
    """Run a daemon without its HTTP server; leaving stops it within ``daemon.stop_seconds``.

    Args:
        config: what holds for it.
        record: write down in this file what is asked of it.
        lost: told, on some thread, that the GPU has failed; nothing is packed or unpacked any more.

    Raises:
        ConfigError: a policy file, the state directory or the file to record into cannot be used.
        AlreadyRunning: another process holds the state directory.
    """
    os.umask(0o077)
    torch.set_num_threads(config.codec.threads or max(1, (os.cpu_count() or 1) // 2))
    state = await asyncio.to_thread(StateDirectory, config.daemon.state)
    try:
        built, tags, pinned = await asyncio.to_thread(_assemble, config, state, record, lost)
        try:
            for tag in await built.recover(tags):
                _log.warning("tenant %s belongs to another master key and is removed", tag)
                built.metrics.foreign.inc()
                await asyncio.to_thread(state.remove_tenant, tag)
            yield built
        finally:
            await built.close(asyncio.get_running_loop().time() + config.daemon.stop_seconds * FLUSH_SHARE)
            if pinned:
                await asyncio.to_thread(pinned.close)
    finally:
        await asyncio.to_thread(state.close)


def _assemble(
    config: Config, state: StateDirectory, record: Path | None, lost: Lost
) -> tuple[Service, list[str], Pinned | None]:
    """Put the rooms together; return the service, the tenants found on disk, and host memory if pinned."""
    policies = load_policies(config.policies)
    try:
        memory = HostMemory(config.host.capacity)
    except (OSError, OverflowError) as error:
        size = show_bytes(config.host.capacity)
        raise ConfigError("config.toml", "host.capacity", f"{size} cannot be had: {error}") from None
    metrics, registry = Metrics(), Registry()
    lane = Lane("profiles")
    sightings = Sightings(FADING * policies[-1].evict.half_life)
    device, accelerator = _device_memory(config), _accelerator(config)
    if accelerator:
        stages = on_cuda(accelerator.device, lost)
    else:
        stages = copies_on_cuda(device.device, lost) if device else on_threads()
    pinned = pin(memory.slab) if device or accelerator else None
    metrics.pinned.set(pinned is not None)
    tiers = shelves(
        policies[-1], sightings, gpu=device.capacity if device else 0, host=memory.capacity,
        disk=config.disk.capacity, granule=GRANULE, tenants=config.tenants.share(),
    )  # fmt: skip
    catalog = Catalog(tiers, lambda raw: footprint(MAX_ENVELOPE_BYTES, choose.bound(raw)), sightings)
    mover = Mover(
        memory=memory,
        put_record=Put,
        stages=stages,
        scratch=HeapScratch,
        metrics=metrics,
        footprint=footprint,
        device=device,
    )
    driver = Driver(catalog, memory, mover, registry, metrics, device=device)
    profiles = ProfileFolder(config.codec.profiles)

    def codec(identity: Identity, choice: CodecChoice) -> Codec:
        return choose.codec_for(identity, choice, profiles, accelerator)

    def open_environment(tag: str) -> Environment:
        return Environment(state.tenant(tag), quota=config.disk.capacity)

    tenancy = Tenancy(
        driver, registry, lane=lane, metrics=metrics, policies=policies, master=state.master_key(),
        codecs=codec, open_environment=open_environment if config.disk.capacity else None,
    )  # fmt: skip
    lanes, recorder = [*stages.streams(), lane], None
    if record:
        lanes.append(writing := Lane("record"))
        recorder = Recorder(record, writing, metrics)
    service = Service(
        driver=driver, memory=memory, tenancy=tenancy, lanes=lanes, metrics=metrics, recorder=recorder
    )
    return service, list(state.tenants()), pinned


def _device_memory(config: Config) -> DeviceMemory | None:
    """Return the GPU tier, None where there is none."""
    gpu = config.gpu
    if gpu.capacity == 0 or (gpu.capacity == "auto" and not torch.cuda.is_available()):
        return None
    device, capacity = _cuda(config, "gpu.capacity"), gpu.capacity
    if capacity == "auto":
        capacity = torch.cuda.get_device_properties(device).total_memory // AUTO_GPU
    try:
        return DeviceMemory(capacity, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "config.toml", "gpu.capacity", f"{show_bytes(capacity)} cannot be had: {error}"
        ) from None


def _accelerator(config: Config) -> Accelerator | None:
    """Return what packs and unpacks, None for the CPU."""
    where = config.codec.device
    if where == "cpu" or (where == "auto" and not torch.cuda.is_available()):
        return None
    device = _cuda(config, "codec.device")
    return Accelerator(device, nvcomp.load(device))


def _cuda(config: Config, field: str) -> torch.device:
    """Return the CUDA device that a field asks for."""
    number, found = config.gpu.device, torch.cuda.device_count()
    if number >= found:
        why = f"asks for the CUDA device {number} (gpu.device), and CUDA finds {found} of them"
        raise ConfigError("config.toml", field, why)
    return torch.device("cuda", number)


class _Reload:
    """Reads the policy files anew, for the API and for SIGHUP, and tells systemd meanwhile.

    SIGHUP also has the recording go on in a new file, if the old one was moved away.
    """

    def __init__(self, config: Config, service: Service, notify: SystemdNotifier) -> None:
        self._config, self._service, self._notify = config, service, notify
        self._one = asyncio.Lock()

    async def __call__(self) -> None:
        async with self._one:
            self._notify.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                policies = await asyncio.to_thread(load_policies, self._config.policies)
                await self._service.reload(policies)
            finally:
                self._notify.notify("READY=1")

    async def whenever(self, asked: asyncio.Event) -> None:
        """Do it each time that it is asked for; a wrong file is logged, and what was in effect stays so."""
        while await asked.wait():
            asked.clear()
            await self._service.reopen()
            try:
                await self()
            except ConfigError as error:
                _log.error("nothing was reloaded: %s", error)
                self._notify.notify(f"STATUS=Nothing was reloaded: {error}")
            except Exception:  # noqa: BLE001 - logged; a signal must not end what serves
                _log.exception("unexpected failure while policies were reloaded")
            else:
                self._notify.notify("STATUS=")


async def serve(config: Config, record: Path | None = None) -> None:
    """Run a daemon until SIGTERM or SIGINT; SIGHUP reads the policy files anew.

    Args:
        config: what holds for it.
        record: write down in this file what is asked of it.

    Raises:
        ConfigError, AlreadyRunning: it could not be started.
        DeviceLost: the GPU failed, and so it has ended; what was packed or on disk by then is kept.
    """
    stop, hangup = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    faults: list[DeviceLost] = []

    def lost(error: DeviceLost) -> None:
        faults.append(error)
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    notify = SystemdNotifier()
    async with service(config, record, lost) as running:
        reload = _Reload(config, running, notify)
        app = create_app(running, _limits(config), reload=reload)
        runner = await start(app, config.daemon.socket)
        reloading = asyncio.create_task(reload.whenever(hangup))
        try:
            _log.info(
                "ready on %s with %s of host memory and %s of disk",
                config.daemon.socket, show_bytes(config.host.capacity), show_bytes(config.disk.capacity),
            )  # fmt: skip
            notify.notify("READY=1")
            await stop.wait()
            _log.info("stopping")
            notify.notify("STOPPING=1")
            running.drain()
        finally:
            reloading.cancel()
            await runner.cleanup()
    if faults:
        raise faults[0]


def _limits(config: Config) -> Limits:
    return Limits(
        connections=config.limits.connections,
        in_flight=config.limits.in_flight,
        tenant_in_flight=config.limits.tenant_in_flight,
        shutdown_s=config.daemon.stop_seconds * DRAIN_SHARE,
    )
