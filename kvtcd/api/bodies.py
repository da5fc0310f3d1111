"""Bodies in and out: counted, never joined, and never waited for without end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import HttpVersion11, web

from kvtcd.api.limits import Limits
from kvtcd.api.state import LIMITS
from kvtcd.core.errors import TooLarge
from kvtcd.core.fields import json_object

OCTETS = "application/octet-stream"
JSON = "application/json"


def declared(request: web.Request, what: str, limit: int) -> int:
    """Return the declared length of a body, before any of it is read.

    Raises:
        HTTPLengthRequired: there is none.
        TooLarge: it is over `limit`.
    """
    nbytes = request.content_length
    if nbytes is None:
        raise web.HTTPLengthRequired(text="send Content-Length; a chunked body is not accepted")
    if nbytes > limit:
        raise TooLarge(what, nbytes, limit)
    return nbytes


def require_type(request: web.Request, *allowed: str) -> str:
    """Return the media type of a body.

    Raises:
        HTTPUnsupportedMediaType: it is none of those allowed.
    """
    # Without the header aiohttp assumes octets; demanding it keeps plain forms of web pages out.
    if not request.headers.get("Content-Type") or request.content_type not in allowed:
        raise web.HTTPUnsupportedMediaType(text=f"send Content-Type: {' or '.join(allowed)}")
    return request.content_type


async def receive(request: web.Request) -> AsyncIterator[bytes]:
    """Yield a body of declared length in the pieces it arrives in. The client is asked for it only now.

    Raises:
        HTTPRequestTimeout: it stalled, or came too slowly on average.
    """
    limits = request.app[LIMITS]
    loop = asyncio.get_running_loop()
    await _continue(request)
    received, waited = 0, 0.0
    while True:
        asked = loop.time()
        try:
            async with asyncio.timeout(limits.stall_s):
                piece = await request.content.readany()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"no byte of the body for {limits.stall_s:g} s") from None
        if not piece:
            return
        waited += loop.time() - asked  # the client's time; ours, waiting for room, is not held against him
        received += len(piece)
        if waited > limits.grace_s and received < limits.rate * waited:
            raise web.HTTPRequestTimeout(text=f"the body comes slower than {limits.rate:g} bytes a second")
        yield piece


async def _continue(request: web.Request) -> None:
    if "Expect" in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


async def read_bytes(request: web.Request, what: str, limit: int) -> bytearray:
    """Read a small body whole.

    Raises:
        TooLarge: it is over `limit`.
    """
    declared(request, what, limit)
    body = bytearray()
    async for piece in receive(request):
        body += piece
    return body


async def read_json(request: web.Request) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        BadField: the body is something else.
    """
    require_type(request, JSON)
    return json_object(await read_bytes(request, "JSON body", request.app[LIMITS].json_bytes))


def json_response(
    body: Mapping[str, object], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an answer in JSON, which nobody on its way keeps."""
    return web.Response(
        status=status,
        body=json.dumps(body, separators=(",", ":")).encode(),
        content_type=JSON,
        headers={"Cache-Control": "no-store"} | dict(headers or {}),
    )


async def send(response: web.StreamResponse, piece: bytes | memoryview, limits: Limits) -> None:
    """Write one piece of at most 1 MiB, straight from where it lies.

    Raises:
        ConnectionResetError: the client does not take it.
    """
    try:
        async with asyncio.timeout(limits.stall_s):
            await response.write(piece)
    except TimeoutError:
        raise ConnectionResetError("the client takes no bytes") from None
