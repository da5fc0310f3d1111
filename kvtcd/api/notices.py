"""The route of notices: what becomes of the caller's blocks, as it happens."""

from __future__ import annotations

import asyncio
import math
import socket

from aiohttp import web

from kvtcd.api.parameters import IN_NAMESPACE
from kvtcd.api.route import Body, Parameter, reply, route
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.errors import UnknownNamespace
from kvtcd.core.forms import text
from kvtcd.core.notices import HEARTBEAT, HEARTBEAT_S, LAST_ID_HEADER, MEDIA_TYPE

_UNREAD = 4 << 10
"""Bytes that a listener may leave unread in the kernel, and as many again here. With more he learns later
that he has missed something; and whoever reads in small pieces would seem not to read at all, since the
kernel gives room back only where a whole write was read."""


LAST_ID = Parameter(LAST_ID_HEADER, "header", text(), "Go on after the event of this id.")
_EVENTS = Body(MEDIA_TYPE, {"type": "string"}, "Server-Sent Events; `data` of each is a JSON object.")


@route(
    "GET", "/v1/events", IN_NAMESPACE, LAST_ID,
    replies={200: reply("Events.", _EVENTS)}, raises=(UnknownNamespace,),
)  # fmt: skip
async def stream(request: web.Request) -> web.StreamResponse:
    """Tell what becomes of the caller's blocks, until he goes or the daemon stops."""
    service, tenant = request.app[SERVICE], request[TENANT]
    name = IN_NAMESPACE.of(request)
    if name is not None:
        service.namespace(tenant, name)
    with service.feeds.listen(tenant, name, LAST_ID.of(request)) as listener:
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"})
        response.enable_chunked_encoding()
        _keep_short(request)
        await response.prepare(request)
        await _send(request, response, HEARTBEAT)  # he sees that he listens before anything happens
        while (notices := await listener.take(HEARTBEAT_S)) is not None:
            await _send(request, response, b"".join(notice.frame() for notice in notices) or HEARTBEAT)
        await response.write_eof()
        return response


def _keep_short(request: web.Request) -> None:
    assert request.transport is not None, "whoever asks is there"
    request.transport.set_write_buffer_limits(_UNREAD)
    request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)


async def _send(request: web.Request, response: web.StreamResponse, frames: bytes) -> None:
    """Write some events, however long it takes: a listener keeps nothing from anybody.

    Raises:
        ConnectionResetError: the client takes nothing at all for `stall_s`, and as long again.
    """
    transport, left = request.transport, math.inf

    async def write() -> None:
        await response.write(frames)
        await request.writer.drain()  # aiohttp itself waits only above 64 KiB

    writing = asyncio.create_task(write())
    try:
        while transport is not None:
            done, _ = await asyncio.wait((writing,), timeout=request.app[LIMITS].stall_s)
            if done:
                return await writing
            before, left = left, transport.get_write_buffer_size()
            if left >= before:
                break
    finally:
        writing.cancel()
    raise ConnectionResetError("the client takes no bytes")
