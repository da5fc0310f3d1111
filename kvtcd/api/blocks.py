"""Routes of single blocks."""

from __future__ import annotations

from aiohttp import web

from kvtcd.api.bodies import OCTETS, declared, json_response, receive, require_type, send
from kvtcd.api.parameters import Deadline, Target, refuse_if_stopping, wants_durable
from kvtcd.api.region import Part
from kvtcd.api.state import IN_FLIGHT, LIMITS, REGIONS, SERVICE
from kvtcd.core.errors import BadRequest, NotFound
from kvtcd.core.keys import parse_key
from kvtcd.core.messages import TIER_HEADER, TOKENS_HEADER, BlockHead, Found
from kvtcd.core.regions import Landed, Placed


async def put(request: web.Request) -> web.Response:
    """``PUT …/blocks/{key}``: 201 when it was stored, 200 when there was no need to or no room."""
    refuse_if_stopping(request)
    target, limits = Target.of(request), request.app[LIMITS]
    if len(request.query) != len(set(request.query)):
        raise BadRequest("query", "a parameter is given twice")
    placed = Placed.from_query(request.query)
    query = {name: value for name, value in request.query.items() if not placed or name not in Placed.FIELDS}
    head = BlockHead.from_query(request.match_info["key"], query)
    require_type(request, OCTETS)
    nbytes = declared(request, "block", limits.block_bytes)
    durable = wants_durable(request)
    part: Part | None = None
    if placed:
        if nbytes:
            raise BadRequest("body", "must be empty: the bytes are in the region")
        part = request.app[REGIONS].part(target.tenant, placed.region, placed.span)
        nbytes = placed.span.length
    with request.app[IN_FLIGHT].take(target.tenant, nbytes):
        async with request.app[SERVICE].blocks.batch(
            target.namespace, target.salt, target.deadline, durable=durable
        ) as batch:
            slot = await batch.reserve(head, nbytes)
            if slot is not None and part is not None:
                await part.fill(slot, limits.stall_s)
            elif slot is not None:
                async for piece in receive(request):
                    slot.write(memoryview(piece))
            (result,) = await batch.commit()
    return json_response(
        result.to_json(),
        status=201 if result.outcome == "stored" else 200,
        headers=applied(durable=durable),
    )


async def get(request: web.Request) -> web.StreamResponse:
    """``GET …/blocks/{key}``: the raw bytes, in the body or in a region."""
    target, limits = Target.of(request), request.app[LIMITS]
    key = parse_key(request.match_info["key"])
    placed = Placed.from_query(request.query)
    part = request.app[REGIONS].part(target.tenant, placed.region, placed.span) if placed else None
    async with request.app[SERVICE].blocks.read(target.namespace, key, target.salt, target.deadline) as lease:
        with request.app[IN_FLIGHT].take(target.tenant, lease.nbytes):
            if part is not None:
                await part.take(lease, limits.stall_s)
                return json_response(Landed(Found(key, lease.tokens, lease.tier), lease.nbytes).to_json())
            response = web.StreamResponse(
                headers={
                    "Content-Length": str(lease.nbytes),
                    "Content-Type": OCTETS,
                    TOKENS_HEADER: str(lease.tokens),
                    TIER_HEADER: lease.tier,
                }
            )
            await response.prepare(request)
            for piece in lease.pieces():
                await send(response, piece, limits)
            await response.write_eof()
            return response


async def head(request: web.Request) -> web.Response:
    """``HEAD …/blocks/{key}``: what a GET would find. It moves nothing and grants nothing."""
    target = Target.of(request)
    key = parse_key(request.match_info["key"])
    (found,) = request.app[SERVICE].prefixes.match(target.namespace, [key], target.salt).blocks
    if found.tier is None:
        raise NotFound
    return web.Response(
        headers={
            "Content-Length": str(target.namespace.identity.layout.nbytes(found.tokens)),
            "Content-Type": OCTETS,
            TOKENS_HEADER: str(found.tokens),
            TIER_HEADER: found.tier,
        }
    )


async def delete(request: web.Request) -> web.Response:
    """``DELETE …/blocks/{key}``: gone from every tier before the answer, once its readers have finished.

    It is served no more from the beginning; past the deadline, the rest goes on.
    """
    target = Target.of(request)
    key = parse_key(request.match_info["key"])
    async with Deadline(target.deadline).bound("the deletion", goes_on=True):
        if not await request.app[SERVICE].blocks.delete(target.namespace, [key], target.salt):
            raise NotFound
    return web.Response(status=204)


def applied(*, durable: bool) -> dict[str, str]:
    """Return the header that says which preference was honoured (RFC 7240)."""
    return {"Preference-Applied": "durable"} if durable else {}
