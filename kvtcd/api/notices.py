"""The route of notices: what becomes of the caller's blocks, as it happens."""

from __future__ import annotations

from aiohttp import web

from kvtcd.api.bodies import send
from kvtcd.api.parameters import only
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.notices import HEARTBEAT, HEARTBEAT_S, LAST_ID_HEADER, MEDIA_TYPE


async def stream(request: web.Request) -> web.StreamResponse:
    """``GET /v1/events``: Server-Sent Events, until the client goes or the daemon stops."""
    service, limits, tenant = request.app[SERVICE], request.app[LIMITS], request[TENANT]
    name = only(request, "namespace").get("namespace")
    if name is not None:
        service.namespace(tenant, name)
    with service.feeds.listen(tenant, name, request.headers.get(LAST_ID_HEADER)) as listener:
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await send(response, HEARTBEAT, limits)  # the client sees that it listens before anything happens
        while (notices := await listener.take(HEARTBEAT_S)) is not None:
            await send(response, b"".join(notice.frame() for notice in notices) or HEARTBEAT, limits)
        await response.write_eof()
        return response
