"""Routes of leases: blocks that stay for a while."""

from __future__ import annotations

from aiohttp import web

from kvtcd.api.bodies import json_response, read_json
from kvtcd.api.parameters import BLOCKS, LEASE, Target, refuse_if_stopping
from kvtcd.api.route import EMPTY, reply, route
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.errors import BadRequest, DeadlineExceeded, NotFound
from kvtcd.core.matches import LeaseInfo
from kvtcd.core.messages import Pin


@route(
    "POST", "/v1/namespaces/{ns}/pin", *BLOCKS, body=Pin,
    replies={201: reply("They stay.", LeaseInfo)}, raises=(NotFound, DeadlineExceeded),
)  # fmt: skip
async def pin(request: web.Request) -> web.Response:
    """Keep blocks, wherever they are, for some seconds; all of them or none."""
    refuse_if_stopping(request)
    target, most = Target.of(request), request.app[LIMITS].batch_blocks
    asked = await read_json(request, Pin)
    if len(asked.keys) > most:
        raise BadRequest("keys", f"{len(asked.keys)} of them; at most {most} in one request")
    service = request.app[SERVICE]
    record_keys = service.prefixes.record_keys(target.namespace, asked.keys, target.salt)
    lease = await service.leases.take(target.tenant, record_keys, asked.seconds, target.deadline)
    return json_response(lease, status=201)


@route("DELETE", "/v1/leases/{id}", LEASE, replies={204: reply("It has ended.", EMPTY)}, raises=(NotFound,))
async def give_back(request: web.Request) -> web.Response:
    """End a lease: its blocks go as they would have."""
    request.app[SERVICE].leases.give_back(request[TENANT], str(LEASE.of(request)))
    return web.Response(status=204)
