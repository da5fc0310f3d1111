"""The daemon as a process: from its sockets to its exit, with signals in between."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from pathlib import Path

from kvtcd.api import listeners
from kvtcd.api.app import create_app, start
from kvtcd.api.auth import authenticate
from kvtcd.api.limits import Limits
from kvtcd.api.listeners import Listener
from kvtcd.api.publisher import Publication, Publisher
from kvtcd.api.tls import Certificate, Tls
from kvtcd.bootstrap import service, tracing
from kvtcd.config import Config, load_policies, load_tokens, show_bytes
from kvtcd.config.remote import CREDENTIAL as REMOTE
from kvtcd.core.access import Token
from kvtcd.core.errors import ConfigError, DeviceLost
from kvtcd.cuda.imports import Imports
from kvtcd.engine.pulse import PATIENCE, Pulse
from kvtcd.engine.service import Service
from kvtcd.systemd import Supervisor, credential, inherited
from kvtcd.tiers.state import MASTER_KEY

_log = logging.getLogger(__name__)
DRAIN_SHARE = 0.3
"""Share of ``daemon.stop_seconds`` for ending requests; then comes `bootstrap.FLUSH_SHARE`."""
STOP_MARGIN_S = 15.0
"""What closing may take beyond ``daemon.stop_seconds`` before the service manager kills."""
TOKENS = "kvtcd.tokens"
"""Name of the credential that may hold the tokens instead of the file."""
LOOK_S = 10.0
"""Longest time between two looks at whether all threads get something done."""
START_S = 60.0
"""The service manager gives up on a start in which the event loop was silent for so long."""


async def serve(config: Config, record: Path | None = None) -> None:
    """Run a daemon until SIGTERM or SIGINT; SIGHUP reads policies, tokens and certificate anew.

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
    with closing(Supervisor(os.environ)) as supervisor:
        encrypted = config.tcp.tls is not None
        handed = [
            (name, listeners.adopt(name, found, encrypted=encrypted)) for name, found in inherited(os.environ)
        ]
        obstacle = await asyncio.to_thread(listeners.obstacle, config.daemon.socket)
        if obstacle and listeners.DATA not in dict(handed):
            raise config.fault("daemon.socket", obstacle)  # before anything is made
        master = await asyncio.to_thread(credential, os.environ, MASTER_KEY)
        entry = await asyncio.to_thread(credential, os.environ, REMOTE)
        entrance = await asyncio.to_thread(_Entrance, config, handed)
        watching = asyncio.create_task(_ask_for_time(supervisor, stop))
        try:
            async with (
                tracing(config) as tracer,
                service(config, record, lost, master=master, remote=entry, tracer=tracer) as running,
                _publisher(config, running),
            ):
                watching.cancel()
                watching = asyncio.create_task(_attest(supervisor, running.pulse))
                reload = _Reload(config, running, supervisor, entrance)
                app = create_app(
                    running, _limits(config),
                    reload=reload, authenticate=authenticate(entrance.tokens), tls=entrance.tls,
                    traced=tracer.middleware if tracer else None,
                    devices=Imports() if config.gpu.regions else None,
                )  # fmt: skip
                runner = await start(app, await asyncio.to_thread(_listeners, config, handed))
                reloading = asyncio.create_task(reload.whenever(hangup))
                try:
                    where = ", ".join(map(str, runner.addresses))
                    _log.info(
                        "ready on %s with %s of host memory and %s of disk",
                        where, show_bytes(config.host.capacity), show_bytes(config.disk.capacity),
                    )  # fmt: skip
                    supervisor.tell("READY=1", status=f"Serving on {where}")
                    await stop.wait()
                    _log.info("stopping")
                    limit = config.daemon.stop_seconds + STOP_MARGIN_S
                    supervisor.tell(
                        "STOPPING=1", _extended(limit), status="Finishing requests, then writing to disk"
                    )
                    running.drain()
                finally:
                    reloading.cancel()
                    await runner.cleanup()
        finally:
            watching.cancel()
    if faults:
        raise faults[0]


def _publisher(config: Config, running: Service) -> AbstractAsyncContextManager[object]:
    """Return what publishes KV events while it is entered: nothing, if nothing is configured.

    Raises:
        ConfigError: what is configured cannot be had.
    """
    said = config.events
    if not said.zmq:
        return nullcontext()
    what = Publication(said.zmq, said.replay, said.topic, said.tenant, as_int=said.hashes == "int64")
    try:
        return Publisher(running, what)
    except ModuleNotFoundError as error:
        why = f"needs {error.name}, which is not installed: pip install 'kvtcd[events]'"
        raise config.fault("events.zmq", why) from None
    except OSError as error:
        field = f"events.{'replay' if error.filename == said.replay else 'zmq'}"
        raise config.fault(field, f"{error.filename} cannot be bound: {error.strerror}") from None


def _listeners(config: Config, handed: list[tuple[str, Listener]]) -> list[Listener]:
    """Return what connections come in by: sockets that were handed over, and for the rest some bound here.

    Raises:
        ConfigError: what is configured cannot be bound.
        AlreadyRunning: somebody listens on what is configured.
    """
    every, names = [listener for _, listener in handed], dict(handed)
    if listeners.DATA not in names:
        every += listeners.bind_both(config.daemon.socket)
    if listeners.TCP not in names and config.tcp.address:
        try:
            every.append(listeners.bind_tcp(*config.tcp.address))
        except OSError as error:
            why = f"{config.tcp.listen} cannot be bound: {error.strerror}"
            raise config.fault("tcp.listen", why) from None
    return every


class _Entrance:
    """Who may come by TCP, and what that is encrypted with; without TCP there is neither.

    Attributes:
        tokens: a list that is there as long as the daemon, with the tokens that are valid now.
        tls: None where nothing is encrypted.

    Raises:
        ConfigError: tokens or certificate cannot be used.
    """

    def __init__(self, config: Config, handed: list[tuple[str, Listener]]) -> None:
        self._config = config
        self._open = config.tcp.address is not None or listeners.TCP in dict(handed)
        self.tls = Tls(*config.tcp.tls) if self._open and config.tcp.tls else None
        self.tokens = [*self._known()]

    def _known(self) -> tuple[Token, ...]:
        if not self._open:
            return ()
        return load_tokens(self._config.tcp.tokens, credential(os.environ, TOKENS))

    def read(self) -> tuple[tuple[Token, ...], Certificate | None]:
        """Read the files as they are now; nothing changes by it.

        Raises:
            ConfigError: one of them is wrong.
        """
        return self._known(), self.tls.read() if self.tls else None

    async def take(self, tokens: tuple[Token, ...], certificate: Certificate | None) -> None:
        """Let what was read hold from now on."""
        if self.tls and certificate:
            await asyncio.to_thread(self.tls.take, certificate)
        self.tokens[:] = tokens


async def _ask_for_time(supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Have a start take as long as it takes: after a power cut all that is on disk is looked through.

    One that is to stop asks no longer, and is killed in time; the next one begins to look anew.
    """
    while not stop.is_set():
        supervisor.tell(_extended(START_S), status="Taking in what is on disk")
        await asyncio.sleep(START_S / 3)


def _extended(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}"


async def _attest(supervisor: Supervisor, pulse: Pulse) -> None:
    """Tell the watchdog that all is well while it is: this loop turns, every thread gets something done."""
    every = min(LOOK_S, supervisor.watchdog / 3 if supervisor.watchdog else LOOK_S)
    silent = False
    while True:
        stuck = pulse.stuck(asyncio.get_running_loop().time())
        if stuck is None:
            supervisor.tell("WATCHDOG=1")
        elif not silent:
            _log.error("kvtcd-%s has ended nothing for %g s; the watchdog is not fed", stuck, PATIENCE)
            supervisor.tell(status=f"The thread kvtcd-{stuck} is stuck")
        silent = stuck is not None
        await asyncio.sleep(every)


class _Reload:
    """Reads files anew, and tells the service manager meanwhile: policies for the API, all for SIGHUP.

    If one file is wrong, nothing changes. SIGHUP also has the recording go on in a new file, if the old one
    was moved away.
    """

    def __init__(self, config: Config, service: Service, supervisor: Supervisor, entrance: _Entrance) -> None:
        self._config, self._service, self._supervisor = config, service, supervisor
        self._entrance = entrance
        self._one = asyncio.Lock()

    async def __call__(self) -> None:
        await self._told(self._policies)

    async def _policies(self) -> None:
        policies = await asyncio.to_thread(load_policies, self._config.policies)
        await self._service.reload(policies)

    async def _everything(self) -> None:
        renewed = await asyncio.to_thread(self._entrance.read)
        await self._policies()
        await self._entrance.take(*renewed)

    async def _told(self, read: Callable[[], Awaitable[None]]) -> None:
        async with self._one:
            # The time tells a manager (`Type=notify-reload`) that this answers its signal and no earlier one.
            self._supervisor.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            status = "Configuration read anew"
            try:
                await read()
            except BaseException as error:
                status = f"Nothing was reloaded: {error}"
                raise
            finally:
                self._supervisor.tell("READY=1", status=status)

    async def whenever(self, asked: asyncio.Event) -> None:
        """Do it each time that it is asked for; a wrong file is logged, and what was in effect stays so."""
        while await asked.wait():
            asked.clear()
            await self._service.reopen()
            try:
                await self._told(self._everything)
            except ConfigError as error:
                _log.error("nothing was reloaded: %s", error)
            except Exception:  # noqa: BLE001 - logged; a signal must not end what serves
                _log.exception("unexpected failure while files were read anew")


def _limits(config: Config) -> Limits:
    return Limits(
        connections=config.limits.connections,
        in_flight=config.limits.in_flight,
        tenant_in_flight=config.limits.tenant_in_flight,
        regions=config.limits.regions,
        region_bytes=config.limits.region_bytes,
        device_region_bytes=config.limits.device_region_bytes,
        shutdown_s=config.daemon.stop_seconds * DRAIN_SHARE,
    )
