"""Routes of leases: blocks that stay for a while."""

from __future__ import annotations

from aiohttp import web

from kvtcd.api.bodies import json_response, read_json
from kvtcd.api.parameters import Target, refuse_if_stopping
from kvtcd.api.state import LIMITS, SERVICE, TENANT
from kvtcd.core.errors import BadRequest
from kvtcd.core.fields import Fields
from kvtcd.core.messages import keys_from_json


async def pin(request: web.Request) -> web.Response:
    """``POST …/pin``: keep blocks, wherever they are, for `seconds`; all of them or none."""
    refuse_if_stopping(request)
    target, limits = Target.of(request), request.app[LIMITS]
    body = await read_json(request)
    seconds = Fields(body, "body").number("seconds", 0, limits.lease_s)
    keys = keys_from_json({name: value for name, value in body.items() if name != "seconds"})
    if not 0 < len(keys) <= limits.batch_blocks:
        raise BadRequest("keys", f"{len(keys)} of them; 1 to {limits.batch_blocks} in one request")
    service = request.app[SERVICE]
    record_keys = service.prefixes.record_keys(target.namespace, keys, target.salt)
    lease = await service.leases.take(target.tenant, record_keys, seconds, target.deadline)
    return json_response(lease.to_json(), status=201)


async def give_back(request: web.Request) -> web.Response:
    """``DELETE /v1/leases/{id}``: let the blocks go as they would have."""
    request.app[SERVICE].leases.give_back(request[TENANT], request.match_info["id"])
    return web.Response(status=204)
