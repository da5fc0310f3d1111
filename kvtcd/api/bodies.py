"""Bodies in and out: counted, never joined, and never waited for without end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from aiohttp import HttpVersion11, web

from kvtcd.api.limits import Limits
from kvtcd.api.route import JSON, ROUTE
from kvtcd.api.state import LIMITS
from kvtcd.core.errors import TooLarge
from kvtcd.core.fields import json_object
from kvtcd.core.message import Message, object_of

M = TypeVar("M", bound=Message)


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


def media_type(request: web.Request) -> str:
    """Return the media type of a body.

    Raises:
        HTTPUnsupportedMediaType: it is none of those that the route declares.
    """
    allowed = list(dict.fromkeys(body.media_type for body in request[ROUTE].bodies))
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


async def read_json(request: web.Request, *models: type[M]) -> M:
    """Read a message: of several, the first one that has all it must have, else the last.

    Raises:
        BadField: the body is no JSON object.
        BadRequest: a field is missing, unknown, of the wrong type or out of range.
    """
    assert set(models) <= {body.model for body in request[ROUTE].bodies}, "undeclared"
    if media_type(request) != JSON:
        raise web.HTTPUnsupportedMediaType(text=f"send Content-Type: {JSON}")
    body = json_object(await read_bytes(request, "JSON body", request.app[LIMITS].json_bytes))
    fits = (model for model in models if object_of(model).required <= body.keys())
    return next(fits, models[-1]).from_json(body)


def json_response(
    body: Message, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an answer in JSON, which nobody on its way keeps."""
    return web.Response(
        status=status,
        body=json.dumps(body.to_json(), separators=(",", ":")).encode(),
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
