"""The whole stack behind a Unix socket, in one process: client, HTTP, service, memory, disk."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from support.invariants import check
from support.patience import PATIENCE_S
from support.toy import IDENTITY, ToyService, toy_service

from kvtcd.api.app import create_app, start
from kvtcd.api.limits import Limits
from kvtcd.api.listeners import bind_both
from kvtcd.api.state import IN_FLIGHT
from kvtcd.core.access import Caller, Scope
from kvtcd.core.entry import State
from kvtcd.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web
    from aiohttp.typedefs import Middleware

    from kvtcd.api.tls import Tls
    from kvtcd.core.identity import Identity
    from kvtcd.core.policy import Policy
    from kvtcd.cuda.imports import Imports

TENANT_HEADER = "Test-Tenant"
NS = "/v1/namespaces/demo"


def by_header(request: web.Request) -> Caller:
    """Authenticate by a header, so that one process can be several tenants; root has all scopes."""
    tenant = request.headers.get(TENANT_HEADER, "uid:1")
    return Caller(tenant, frozenset(Scope) - (set() if tenant == "uid:0" else {Scope.ADMIN}))


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever the other side did."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def until(true: Callable[[], object]) -> None:
    """Wait until something is true; fail if it does not become so."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what is waited for knows nothing of tests
            await asyncio.sleep(0.01)


async def refused() -> None:
    """Reload nothing: there are no files."""
    raise ConfigError("policy.toml", "", "cannot be read")


@dataclass(frozen=True)
class Daemon:
    """A running daemon, and a session that talks to it."""

    toy: ToyService
    app: web.Application
    runner: web.AppRunner
    socket: Path
    session: aiohttp.ClientSession

    def request(self, method: str, path: str, **kwargs: Any) -> Any:
        """Start a request; `path` begins with a slash."""
        return self.session.request(method, f"http://kvtcd{path}", **kwargs)

    async def register(self, identity: Identity = IDENTITY, **headers: str) -> None:
        """Register the namespace of `NS`."""
        async with self.request("PUT", NS, json=identity.to_json(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    async def raw(self, data: bytes, *, upto: bytes = b"") -> bytes:
        """Send bytes, and return what comes back: until the daemon closes, or up to the first `upto`."""
        reader, writer = await asyncio.open_unix_connection(self.socket)
        writer.write(data)
        answer = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while not (upto and upto in answer) and (piece := await reader.read(1 << 16)):
                    answer += piece
        await closed(writer)
        return bytes(answer)

    def blocks(self) -> int:
        """Blocks that can be served."""
        catalog = self.toy.catalog
        return sum(bool(catalog.tiers(key)) for key in catalog.residents.entries)

    async def settled(self) -> None:
        """Wait for a moment in which nothing is held for anybody; fail if it does not come."""
        await until(lambda: not self.held())
        check(self.toy.catalog)

    def held(self) -> list[object]:
        """Return all that is held for somebody right now."""
        residents, promotions = self.toy.catalog.residents, self.toy.catalog.room.promotions
        entries = residents.entries.values()
        moving = [c for e in entries for c in e.copies.values() if c.state is not State.READY]
        pinned = [
            e
            for e in entries
            if e.key in residents.pins or promotions.get(e.key) or e.key in residents.transfers
        ]
        return (
            [self.app[IN_FLIGHT].held, *moving, *pinned]
            if moving or pinned or self.app[IN_FLIGHT].held
            else []
        )


def unhurried(**changes: Any) -> Limits:
    """Return limits by which nothing depends on how fast the machine is, but for those that are given."""
    long = dict.fromkeys(("stall_s", "grace_s", "deadline_s", "shutdown_s"), PATIENCE_S)
    return Limits(**(long | changes))


@asynccontextmanager
async def running(
    limits: Limits | None = None,
    *,
    authenticate: Any = by_header,
    load: Callable[[], tuple[Policy, ...]] | None = None,
    tls: Tls | None = None,
    traced: Middleware | None = None,
    devices: Imports | None = None,
    identify_peer: Callable[[Any], Caller] = lambda _: Caller("uid:1", frozenset({Scope.DATA})),
    state: Path | None = None,
    **toy: Any,
) -> AsyncIterator[Daemon]:
    """Run a daemon, on a state directory that stays or on one of its own. At the end, nothing may be held."""
    folder = Path(tempfile.mkdtemp(prefix="kvtcd-"))  # short: a socket's path has at most 107 bytes
    try:
        async with toy_service(state or folder / "state", **toy) as built:

            async def reload() -> None:
                await built.service.reload(load())

            app = create_app(
                built.service,
                limits or unhurried(),
                reload=reload if load else refused,
                authenticate=authenticate,
                identify_peer=identify_peer,
                devices=devices,
                tls=tls,
                traced=traced,
            )
            socket = folder / "socket"
            runner = await start(app, await asyncio.to_thread(bind_both, socket))
            try:
                connector = aiohttp.UnixConnector(str(socket))
                async with aiohttp.ClientSession(connector=connector) as session:
                    daemon = Daemon(built, app, runner, socket, session)
                    yield daemon
                    await daemon.settled()
            finally:
                await runner.cleanup()
    finally:
        shutil.rmtree(folder)
