"""Routes of policies: which are in effect, and reading them anew."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from kvtcd.api.auth import require
from kvtcd.api.bodies import json_response
from kvtcd.api.parameters import Deadline, refuse_if_stopping
from kvtcd.api.state import RELOAD, SERVICE, TENANT
from kvtcd.core.access import Scope


async def listing(request: web.Request) -> web.Response:
    """``GET /v1/policies``: in order, each with the namespaces of the caller that it governs."""
    policies = request.app[SERVICE].policies(request[TENANT])
    return json_response({"policies": [asdict(p) | {"namespaces": names} for p, names in policies]})


async def reload(request: web.Request) -> web.Response:
    """``POST /v1/policies:reload``: all files are right and in effect, or nothing has changed."""
    refuse_if_stopping(request)
    require(request, Scope.ADMIN)
    async with Deadline.of(request).bound("the reload"):
        await request.app[RELOAD]()
    return await listing(request)
