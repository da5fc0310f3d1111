"""Whose request it is. The kernel says so, or a token; never the request itself."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from kvtcd.api.admitted import ADMITTED
from kvtcd.api.page import FILES
from kvtcd.api.state import AUTHENTICATE, SCOPES, TENANT
from kvtcd.core.access import Caller, Scope, Token, bearer

_UCRED = struct.Struct("iII")
_USER = frozenset({Scope.DATA, Scope.METRICS})


def unmapped(uid_map: str, overflow: str) -> int | None:
    """Return the uid that stands for all users whom a user namespace does not know, None if it knows all.

    Args:
        uid_map: of ``/proc/self``, see user_namespaces(7).
        overflow: ``/proc/sys/kernel/overflowuid``.
    """
    rows = [line.split() for line in uid_map.splitlines()]
    return None if rows == [["0", "0", str(2**32 - 1)]] else int(overflow)


_UNMAPPED = unmapped(Path("/proc/self/uid_map").read_text(), Path("/proc/sys/kernel/overflowuid").read_text())
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def authenticate(tokens: Sequence[Token]) -> Callable[[web.Request], Caller]:
    """Return who tells callers apart.

    Args:
        tokens: of those who come by TCP; looked at anew for each request, so they may be replaced.
    """

    def caller(request: web.Request) -> Caller:
        """Return the caller of a request.

        Raises:
            HTTPUnauthorized: he is not known. The answer says nothing of why.
        """
        transport = request.transport
        connection = transport.get_extra_info("socket") if transport else None
        if connection is not None and connection.family == socket.AF_UNIX:
            try:
                return peer(connection)
            except PermissionError as error:
                raise web.HTTPUnauthorized(text=str(error)) from None
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        known = bearer(tokens, token.strip().encode("utf-8", "surrogateescape"))
        if known is None or scheme.lower() != "bearer":
            raise web.HTTPUnauthorized(text="a valid token is needed", headers={"WWW-Authenticate": "Bearer"})
        return known

    return caller


def peer(connection: socket.socket) -> Caller:
    """Return the tenant ``uid:<n>``; the daemon's own user and root may change what holds for all.

    The uid is that of the time of connecting. The pid is not looked at: it may have been given away again.

    Raises:
        PermissionError: one of several users whom this process cannot tell apart.
    """
    _, uid, _ = _credentials(connection)
    if uid == _UNMAPPED:
        raise PermissionError("this user is not known in the daemon's user namespace")
    return Caller(f"uid:{uid}", _USER | {Scope.ADMIN} if uid in {0, os.geteuid()} else _USER)


def is_own(connection: socket.socket) -> bool:
    """Tell whether this very process is at the other end; its pid cannot have been given away."""
    pid, _, _ = _credentials(connection)
    return pid == os.getpid()


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of who has connected."""
    return _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give each request its tenant and its scopes; files of the page are for everybody."""
    if request.path in FILES:
        return await handler(request)
    caller = request.app[AUTHENTICATE](request)
    request[TENANT], request[SCOPES] = caller.tenant, caller.scopes
    with request.app[ADMITTED].while_served(request):
        return await handler(request)
