"""The daemon as a process: from its sockets to its exit, with signals in between."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from kvtcd.api.admitted import ADMITTED
from kvtcd.api.app import create_app, start
from kvtcd.api.auth import authenticate
from kvtcd.api.limits import Limits
from kvtcd.api.listeners import shown
from kvtcd.config import Config, changed, load_policies, show_bytes
from kvtcd.config.remote import CREDENTIAL as REMOTE
from kvtcd.core.errors import ConfigError, DeviceLost
from kvtcd.cuda.imports import Imports
from kvtcd.engine.pulse import PATIENCE, Pulse
from kvtcd.engine.service import Service
from kvtcd.entrance import Entrance, bound, handed_over, publisher, require_free
from kvtcd.systemd import Supervisor, credential
from kvtcd.tiers.state import MASTER_KEY

_log = logging.getLogger(__name__)
DRAIN_SHARE = 0.3
"""Share of ``daemon.stop_seconds`` for ending requests; then comes `bootstrap.FLUSH_SHARE`."""
STOP_MARGIN_S = 15.0
"""What closing may take beyond ``daemon.stop_seconds`` before the service manager kills."""
LOOK_S = 10.0
"""Longest time between two looks at whether all threads get something done."""
START_S = 60.0
"""The service manager gives up on a start in which the event loop was silent for so long."""


async def serve(config: Config, record: Path | None = None, path: Path | None = None) -> None:
    """Run a daemon until SIGTERM or SIGINT; SIGHUP reads policies, tokens and certificate anew.

    Args:
        config: what holds for it.
        record: write down in this file what is asked of it.
        path: the file that `config` was read from; looked at anew with SIGHUP.

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
        handed = await asyncio.to_thread(handed_over, config)  # or refuse, before anything is made
        await asyncio.to_thread(require_free, config, handed)
        master = await asyncio.to_thread(credential, os.environ, MASTER_KEY)
        entry = await asyncio.to_thread(credential, os.environ, REMOTE)
        entrance = await asyncio.to_thread(Entrance, config, handed)
        from kvtcd.bootstrap import service, tracing  # noqa: PLC0415 - torch: what is refused waits for none

        watching = asyncio.create_task(_ask_for_time(supervisor, stop))
        try:
            async with (
                tracing(config) as tracer,
                service(config, record, lost, master=master, remote=entry, tracer=tracer) as running,
                publisher(config, running),
            ):
                watching.cancel()
                watching = asyncio.create_task(_attest(supervisor, running.pulse))
                reload = _Reload(config, path, running, supervisor, entrance)
                app = create_app(
                    running, _limits(config),
                    reload=reload, authenticate=authenticate(entrance.tokens), tls=entrance.tls,
                    traced=tracer.middleware if tracer else None,
                    devices=Imports() if config.gpu.regions else None,
                )  # fmt: skip
                runner = await start(app, await asyncio.to_thread(bound, config, handed))
                reloading = asyncio.create_task(reload.whenever(hangup, app[ADMITTED].review))
                try:
                    where = ", ".join(map(shown, runner.addresses))
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

    def __init__(
        self, config: Config, path: Path | None, service: Service, supervisor: Supervisor, entrance: Entrance
    ) -> None:
        self._config, self._path, self._service, self._supervisor = config, path, service, supervisor
        self._entrance = entrance
        self._one = asyncio.Lock()

    async def __call__(self) -> None:
        await self._told(self._policies)

    async def _policies(self) -> None:
        policies = await asyncio.to_thread(load_policies, self._config.policies)
        await self._service.reload(policies)

    async def _everything(self) -> None:
        tokens, certificate = await asyncio.to_thread(self._entrance.read)
        await self._policies()
        await self._entrance.take(tokens, certificate)
        if tokens:
            _log.info("tokens in effect: %d", len(tokens))
        if certificate:
            _log.info("the certificate in effect ends on %s", certificate.ends)

    async def _compare(self) -> None:
        """Say what config.toml says otherwise now: none of that is in effect before a restart."""
        try:
            names = await asyncio.to_thread(changed, self._config, self._path)
        except ConfigError as error:
            _log.error("what was in effect stays, and the next start would fail: %s", error)
            return
        if names:
            _log.warning("%s has changed, and needs a restart for: %s", self._path, ", ".join(names))

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

    async def whenever(self, asked: asyncio.Event, review: Callable[[], int]) -> None:
        """Do it each time that it is asked for; a wrong file is logged, and what was in effect stays so.

        Args:
            asked: set by who asks.
            review: ends what is under way by tokens that hold no more; returns how much that was.
        """
        while await asked.wait():
            asked.clear()
            await self._service.reopen()
            await self._compare()
            try:
                await self._told(self._everything)
                if ended := review():
                    _log.info("requests ended whose token holds no more, or less: %d", ended)
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
