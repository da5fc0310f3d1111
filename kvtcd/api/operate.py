"""Routes for operators and supervisors: what the daemon is, holds and does."""

from __future__ import annotations

from aiohttp import web

from kvtcd import __version__
from kvtcd.api.bodies import json_response
from kvtcd.api.route import Body, reply, route
from kvtcd.api.state import SCOPES, SERVICE, TENANT, TLS
from kvtcd.core.access import Scope
from kvtcd.core.messages import API_VERSION, Alive, Info, Ready, Welcome
from kvtcd.engine.history import Samples
from kvtcd.engine.stats import Stats, Tenants

_METRICS = Body("text/plain", {"type": "string"}, "The Prometheus text format, version 0.0.4.")


@route("GET", "/v1", replies={200: reply("Versions, boot id and caller.", Welcome)}, stored=False)
async def info(request: web.Request) -> web.Response:
    """Say what runs, and who asks."""
    told = Info(__version__, API_VERSION, request.app[SERVICE].boot_id)
    granted: frozenset[Scope] = request[SCOPES]
    scopes = tuple(sorted(granted))
    return json_response(Welcome(told, request[TENANT], scopes))


@route(
    "GET", "/v1/stats", stored=False,
    replies={200: reply("Sums of the daemon, and of the caller's namespaces.", Stats)},
)  # fmt: skip
async def stats(request: web.Request) -> web.Response:
    """Show the daemon at this moment, and the caller's namespaces."""
    return json_response(request.app[SERVICE].overview.stats(request[TENANT]))


@route("GET", "/v1/history", replies={200: reply("Sums, every ten seconds.", Samples)}, stored=False)
async def history(request: web.Request) -> web.Response:
    """Show sums of the last hour."""
    return json_response(request.app[SERVICE].overview.history.samples)


@route("GET", "/v1/tenants", replies={200: reply("All tenants.", Tenants)}, scope=Scope.ADMIN)
async def tenants(request: web.Request) -> web.Response:
    """Show what each tenant has and found."""
    return json_response(Tenants(tuple(request.app[SERVICE].overview.tenants())))


@route("GET", "/healthz", replies={200: reply("It turns.", Alive)}, scope=None)
async def healthy(_request: web.Request) -> web.Response:
    """Tell whether the event loop turns; answered at the limit of connections too."""
    return json_response(Alive())


@route("GET", "/readyz", replies={200: reply("They are.", Ready)}, scope=None)
async def ready(request: web.Request) -> web.Response:
    """Tell whether blocks are served and taken.

    A full disk is no end of that: the coldest go. Nor is what concerns some tenants alone, or the store that
    is shared: that is named, and all else is served.
    """
    service = request.app[SERVICE]
    if service.ready and not service.draining:
        return json_response(Ready(service.overview.disk, tuple(service.overview.degraded)))
    raise web.HTTPServiceUnavailable(text="stopping" if service.draining else "starting")


@route("GET", "/metrics", replies={200: reply("Sums of the daemon.", _METRICS)}, scope=Scope.METRICS)
async def metrics(request: web.Request) -> web.Response:
    """Show figures for Prometheus."""
    service, tls = request.app[SERVICE], request.app[TLS]
    service.metrics.certificate_ends.set(tls.ends.timestamp() if tls else 0)
    return web.Response(
        body=service.metrics_text(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )
