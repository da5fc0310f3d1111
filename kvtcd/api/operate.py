"""Routes for operators and supervisors: what the daemon is, holds and does."""

from __future__ import annotations

from aiohttp import web

from kvtcd import __version__
from kvtcd.api.auth import require
from kvtcd.api.bodies import json_response
from kvtcd.api.state import SCOPES, SERVICE, TENANT
from kvtcd.core.access import Scope
from kvtcd.core.messages import API_VERSION, Info


async def info(request: web.Request) -> web.Response:
    """``GET /v1``: versions and boot id, and who asks."""
    told = Info(__version__, API_VERSION, request.app[SERVICE].boot_id).to_json()
    tenant, scopes = request[TENANT], request[SCOPES]
    return json_response(told | {"tenant": tenant, "scopes": sorted(scopes)})


async def stats(request: web.Request) -> web.Response:
    """``GET /v1/stats``: the daemon at this moment, and the caller's namespaces."""
    return json_response(request.app[SERVICE].overview.stats(request[TENANT]).to_json())


async def history(request: web.Request) -> web.Response:
    """``GET /v1/history``: sums of the last hour."""
    return json_response(request.app[SERVICE].overview.history.to_json())


async def tenants(request: web.Request) -> web.Response:
    """``GET /v1/tenants``: what each has and found."""
    require(request, Scope.ADMIN)
    return json_response({"tenants": [each.to_json() for each in request.app[SERVICE].overview.tenants()]})


async def healthy(_request: web.Request) -> web.Response:
    """``GET /healthz``: the loop turns."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """``GET /readyz``: blocks are served and taken. A full disk is no end of that: the coldest go."""
    service = request.app[SERVICE]
    if service.ready and not service.draining:
        return json_response({"status": "ready", "disk": service.disk})
    raise web.HTTPServiceUnavailable(text="stopping" if service.draining else "starting")


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``: the Prometheus text format."""
    return web.Response(
        body=request.app[SERVICE].metrics_text(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
