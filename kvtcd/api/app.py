"""The application: routes, middlewares, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from kvtcd.api import batches, blocks, leases, namespaces, notices, openapi, operate, page, policies
from kvtcd.api.admitted import ADMITTED, Admitted
from kvtcd.api.auth import identify, peer
from kvtcd.api.connection import Connection
from kvtcd.api.guard import expect_later, guard
from kvtcd.api.limits import InFlight, Limits, Traffic
from kvtcd.api.listeners import Listener
from kvtcd.api.operations import Operations
from kvtcd.api.problems import SERVER, problems
from kvtcd.api.refusals import Refusals
from kvtcd.api.regions import Regions
from kvtcd.api.side import SideSocket
from kvtcd.api.state import (
    AUTHENTICATE,
    DOCUMENT,
    IN_FLIGHT,
    LIMITS,
    OPERATIONS,
    PEER,
    REFUSALS,
    REGIONS,
    RELOAD,
    SERVICE,
    TLS,
    TRAFFIC,
)
from kvtcd.api.tls import Tls
from kvtcd.core.access import Caller
from kvtcd.cuda.imports import Imports
from kvtcd.engine.service import Service

KEEPALIVE_S = 15.0
LINGER_S = 2.0
"""How long the rest of a refused body is read, so that its sender gets to see the answer."""
CUT_S = 0.5
"""How long a request that outlasted the drain gets to notice that it is cancelled."""
READ_BUFFER = 1 << 20
SILENT = 1024
"""Newcomers that a connection may see before it asks for something."""

ROUTES = (
    page.index,
    page.part,
    operate.info,
    operate.stats,
    operate.history,
    operate.tenants,
    openapi.show,
    namespaces.prefixes,
    notices.stream,
    policies.listing,
    policies.reload,
    batches.operation,
    batches.cancel,
    namespaces.listing,
    namespaces.register,
    namespaces.describe,
    namespaces.purge,
    namespaces.purge_of,
    namespaces.match,
    blocks.put,
    blocks.get,
    blocks.head,
    blocks.delete,
    batches.put,
    batches.get,
    batches.flush,
    batches.demote,
    batches.prefetch,
    leases.pin,
    leases.give_back,
    operate.healthy,
    operate.ready,
    operate.metrics,
)


def create_app(
    service: Service,
    limits: Limits,
    *,
    reload: Callable[[], Awaitable[None]],
    authenticate: Callable[[web.Request], Caller],
    identify_peer: Callable[[socket.socket], Caller] = peer,
    tls: Tls | None = None,
    traced: Middleware | None = None,
    devices: Imports | None = None,
) -> web.Application:
    """Return the application.

    Args:
        service: what it serves.
        limits: its bounds.
        reload: reads the policy files anew; raises `ConfigError` and changes nothing if one is wrong.
        authenticate: returns the caller of a request, or raises an `HTTPException`.
        identify_peer: returns the caller at the other end of a side socket.
        tls: what TCP is encrypted with.
        traced: goes round all else of a request.
        devices: opens memory of GPUs for clients; None: none is opened.
    """
    app = web.Application(middlewares=[*([traced] if traced else []), problems, guard, identify])
    app[SERVICE] = service
    app[LIMITS] = limits
    app[AUTHENTICATE] = authenticate
    app[ADMITTED] = Admitted()
    app[RELOAD] = reload
    app[IN_FLIGHT] = InFlight(limits.in_flight, limits.tenant_in_flight)
    app[TRAFFIC] = Traffic(limits.connections)
    app[REFUSALS] = Refusals(lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call))
    app[OPERATIONS] = Operations(limits.operations)
    app[REGIONS] = Regions(limits, service.metrics, devices)
    service.watch(*app[REGIONS].lanes)
    app[PEER] = identify_peer
    app[TLS] = tls
    app[DOCUMENT] = openapi.document(ROUTES)
    for route in ROUTES:
        app.router.add_route(route.method, route.pattern, route.serve, expect_handler=expect_later)
    app.on_response_prepare.append(_name_server)
    app.on_shutdown.append(_end_operations)
    app.on_cleanup.append(_end_copies)
    return app


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = SERVER


async def _end_operations(app: web.Application) -> None:
    await app[OPERATIONS].close()


async def _end_copies(app: web.Application) -> None:
    await app[REGIONS].close()


class Runner(web.AppRunner):
    """Runs an application, with every setting of aiohttp that matters chosen on purpose."""

    def __init__(self, app: web.Application) -> None:
        self.settings: dict[str, Any] = {
            "access_log": None,  # requests are counted; their targets hold keys, which are not logged
            "logger": _logger(),
            "auto_decompress": False,
            "keepalive_timeout": KEEPALIVE_S,
            "lingering_time": LINGER_S,
            "read_bufsize": READ_BUFFER,
        }
        super().__init__(
            app,
            handler_cancellation=True,  # a client that has gone must hold neither room nor blocks
            shutdown_timeout=CUT_S,
            **self.settings,
        )
        self.side_sockets: list[SideSocket] = []

    async def cleanup(self) -> None:
        """Accept no more connections, let requests end for `Limits.shutdown_s`, then cut the rest."""
        self.app[TRAFFIC].closing = True
        for site in self.sites:
            await site.stop()
        self.app[SERVICE].feeds.close()  # streams without an end of their own
        # aiohttp's own cleanup throws away what arrives from here on, and with it every upload under way.
        await self.app[TRAFFIC].drain(self.app[LIMITS].shutdown_s)
        sides, self.side_sockets = self.side_sockets, []
        for side in sides:
            side.close()
        for side in sides:
            await side.ended()
        await super().cleanup()


class Site(web.SockSite):
    """A listening socket on which nobody can be silent for long while others come.

    aiohttp closes a connection that asks for nothing after `KEEPALIVE_S`; until then enough of them would
    take every descriptor. Here one goes that has asked for nothing when `SILENT` others are there that came
    after it.
    """

    async def start(self) -> None:
        """Listen."""
        await web.BaseSite.start(self)
        self._newest: dict[Connection, None] = {}
        self._server = await asyncio.get_running_loop().create_server(
            self._let_in, sock=self._sock, ssl=self._ssl_context, backlog=self._backlog
        )

    def _let_in(self) -> Connection:
        runner = self._runner
        assert isinstance(runner, Runner), "see `start`"
        assert runner.server is not None, "it was set up"
        newcomer = Connection(runner.server, self._forget, runner.app[REFUSALS], **runner.settings)
        self._newest[newcomer] = None
        if len(self._newest) > SILENT:
            oldest = next(iter(self._newest))
            self._forget(oldest)
            if oldest.transport is not None and not runner.app[TRAFFIC].has_asked(oldest.transport):
                oldest.transport.abort()
        return newcomer

    def _forget(self, connection: Connection) -> None:
        self._newest.pop(connection, None)


async def start(app: web.Application, listeners: Sequence[Listener]) -> Runner:
    """Serve an application until `Runner.cleanup`, which closes the listeners and removes what they bound."""

    async def remove(_app: web.Application) -> None:
        for listener in listeners:
            await asyncio.to_thread(listener.remove)

    app.on_cleanup.append(remove)
    runner = Runner(app)
    await runner.setup()
    for listener in listeners:
        if listener.shares_memory:
            runner.side_sockets.append(SideSocket(listener.socket, app[REGIONS], app[PEER], app[LIMITS]))
        else:
            tls = app[TLS] if listener.socket.family != socket.AF_UNIX else None
            await Site(runner, listener.socket, ssl_context=tls.context if tls else None).start()
    return runner


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
