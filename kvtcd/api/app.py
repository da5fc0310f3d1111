"""The application: routes, middlewares, and the socket it listens on."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvtcd.api import batches, blocks, leases, namespaces, notices, operate, policies
from kvtcd.api.auth import identify, operators, peer
from kvtcd.api.guard import expect_later, guard
from kvtcd.api.limits import InFlight, Limits, Traffic
from kvtcd.api.operations import Operations
from kvtcd.api.problems import problems
from kvtcd.api.state import AUTHENTICATE, IN_FLIGHT, LIMITS, OPERATIONS, OPERATORS, RELOAD, SERVICE, TRAFFIC
from kvtcd.core.errors import AlreadyRunning, ConfigError
from kvtcd.core.identity import NAMESPACE_NAME
from kvtcd.engine.service import Service

KEEPALIVE_S = 15.0
LINGER_S = 2.0
"""How long the rest of a refused body is read, so that its sender gets to see the answer."""
CUT_S = 0.5
"""How long a request that outlasted the drain gets to notice that it is cancelled."""
READ_BUFFER = 1 << 20

_NS = f"/v1/namespaces/{{ns:{NAMESPACE_NAME}}}"
_BLOCK = f"{_NS}/blocks/{{key:[^/]+}}"  # what is no key is answered as such by `parse_key`
_ROUTES = (
    ("GET", "/v1", operate.info),
    ("GET", "/v1/stats", operate.stats),
    ("GET", "/v1/events", notices.stream),
    ("GET", "/v1/policies", policies.listing),
    ("POST", "/v1/policies:reload", policies.reload),
    ("GET", "/v1/operations/{id:[0-9a-f]{32}}", batches.operation),
    ("DELETE", "/v1/operations/{id:[0-9a-f]{32}}", batches.cancel),
    ("GET", "/v1/namespaces", namespaces.listing),
    ("PUT", _NS, namespaces.register),
    ("GET", _NS, namespaces.describe),
    ("DELETE", _NS, namespaces.purge),
    ("POST", f"{_NS}/match", namespaces.match),
    ("PUT", _BLOCK, blocks.put),
    ("GET", _BLOCK, blocks.get),
    ("HEAD", _BLOCK, blocks.head),
    ("DELETE", _BLOCK, blocks.delete),
    ("POST", f"{_NS}/blocks:put", batches.put),
    ("POST", f"{_NS}/blocks:get", batches.get),
    ("POST", f"{_NS}/blocks:flush", batches.flush),
    ("POST", f"{_NS}/demote", batches.demote),
    ("POST", f"{_NS}/prefetch", batches.prefetch),
    ("POST", f"{_NS}/pin", leases.pin),
    ("DELETE", "/v1/leases/{id:[0-9a-f]{32}}", leases.give_back),
    ("GET", "/healthz", operate.healthy),
    ("GET", "/readyz", operate.ready),
    ("GET", "/metrics", operate.metrics),
)


def create_app(
    service: Service,
    limits: Limits,
    *,
    reload: Callable[[], Awaitable[None]],
    authenticate: Callable[[web.Request], str] = peer,
) -> web.Application:
    """Return the application.

    Args:
        service: what it serves.
        limits: its bounds.
        reload: reads the policy files anew; raises `ConfigError` and changes nothing if one is wrong.
        authenticate: returns the tenant of a request, or raises an `HTTPException`.
    """
    app = web.Application(middlewares=[problems, guard, identify])
    app[SERVICE] = service
    app[LIMITS] = limits
    app[AUTHENTICATE] = authenticate
    app[OPERATORS] = operators()
    app[RELOAD] = reload
    app[IN_FLIGHT] = InFlight(limits.in_flight, limits.tenant_in_flight)
    app[TRAFFIC] = Traffic(limits.connections)
    app[OPERATIONS] = Operations(limits.operations)
    for method, path, handler in _ROUTES:
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    app.on_shutdown.append(_end_operations)
    return app


async def _end_operations(app: web.Application) -> None:
    await app[OPERATIONS].close()


class Runner(web.AppRunner):
    """Runs an application, with every setting of aiohttp that matters chosen on purpose."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(
            app,
            access_log=None,  # requests are counted; their targets hold keys, which are not logged
            logger=_logger(),
            auto_decompress=False,
            handler_cancellation=True,  # a client that has gone must hold neither room nor blocks
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            read_bufsize=READ_BUFFER,
            shutdown_timeout=CUT_S,
        )

    async def cleanup(self) -> None:
        """Accept no more connections, let requests end for `Limits.shutdown_s`, then cut the rest."""
        for site in self.sites:
            await site.stop()
        self.app[SERVICE].feeds.close()  # streams without an end of their own
        # aiohttp's own cleanup throws away what arrives from here on, and with it every upload under way.
        await self.app[TRAFFIC].drain(self.app[LIMITS].shutdown_s)
        await super().cleanup()


async def start(app: web.Application, path: Path) -> Runner:
    """Serve an application on a Unix socket, mode 0660, until the runner's `cleanup`, which removes it.

    Raises:
        AlreadyRunning: somebody listens there.
        ConfigError: there is something else than a socket.
    """
    listener, inode = await asyncio.to_thread(listen, path)

    async def remove(_app: web.Application) -> None:
        await asyncio.to_thread(_unlink, path, inode)

    app.on_cleanup.append(remove)
    runner = Runner(app)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner


def listen(path: Path) -> tuple[socket.socket, int]:
    """Bind a Unix socket that owner and group may use; return it and its inode.

    A socket left behind by a daemon that was killed is replaced.

    Raises:
        AlreadyRunning: somebody listens there.
        ConfigError: there is something else than a socket.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Set round the bind: a chmod after it would leave a moment in which everybody may connect.
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(path, "socket", f"cannot be bound: {error.strerror or error}") from None
    finally:
        os.umask(before)
    listener.listen(128)
    return listener, path.stat().st_ino


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(path, "socket", "is taken by something that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise AlreadyRunning(path)


def _unlink(path: Path, inode: int) -> None:
    """Remove our socket, but not that of a successor."""
    with suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


def _logger() -> logging.Logger:
    """Return a logger that shows none of the bytes of requests that could not be parsed."""
    logger = logging.getLogger("kvtcd.api.http")
    logger.addFilter(_without_request_bytes)
    return logger


def _without_request_bytes(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.msg, record.args = "refused a request: %s", (type(record.exc_info[1]).__name__,)
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
