"""Whose request it is. The answer comes from the kernel, never from the request."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvtcd.api.state import AUTHENTICATE, OPERATORS, TENANT

_UCRED = struct.Struct("iII")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def peer(request: web.Request) -> str:
    """Return the tenant of a request that came through a Unix socket: ``uid:<n>`` of the peer.

    The uid is that of the time of connecting. The pid is not looked at: it may have been given away again.

    Raises:
        HTTPUnauthorized: it came another way.
    """
    transport = request.transport
    connection = transport.get_extra_info("socket") if transport else None
    if connection is None or connection.family != socket.AF_UNIX:
        raise web.HTTPUnauthorized(text="only peers on the Unix socket are known")
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return f"uid:{uid}"


def operators() -> frozenset[str]:
    """Return those who may change what holds for all tenants: the daemon's own user, and root."""
    return frozenset({f"uid:{os.geteuid()}", "uid:0"})


def require_operator(request: web.Request) -> None:
    """Let only operators through.

    Raises:
        HTTPForbidden: it is somebody else.
    """
    if request[TENANT] not in request.app[OPERATORS]:
        raise web.HTTPForbidden(text="only the daemon's own user and root may do this")


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give each request its tenant."""
    request[TENANT] = request.app[AUTHENTICATE](request)
    return await handler(request)
