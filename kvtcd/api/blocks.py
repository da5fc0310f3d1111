"""Routes of single blocks."""

from __future__ import annotations

from aiohttp import web

from kvtcd.api.bodies import declared, json_response, media_type, receive, send
from kvtcd.api.parameters import (
    BLOCKS,
    HEAD,
    KEY,
    PLACED,
    PREFER,
    Deadline,
    Target,
    placed,
    refuse_if_stopping,
    wants_durable,
)
from kvtcd.api.parameters import head as head_of
from kvtcd.api.region import Part
from kvtcd.api.route import BLOCK, EMPTY, OCTETS, reply, route
from kvtcd.api.state import IN_FLIGHT, LIMITS, REGIONS, SERVICE
from kvtcd.core.errors import BadRequest, BlockMismatch, DeadlineExceeded, NotFound, StoreFailed, StoreFull
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import TIER_HEADER, TOKENS_HEADER, BlockResult, Found
from kvtcd.core.regions import Landed

_PATH = "/v1/namespaces/{ns}/blocks/{key}"
_ABOUT = {"Kvtcd_Tokens": "Tokens in the block.", "Kvtcd_Tier": "The fastest tier that has it."}
APPLIED = {"Preference_Applied": "`durable`, where that was asked for."}


def key_of(request: web.Request) -> EngineKey:
    """Return the key in the path.

    Raises:
        BadKey: it is none.
    """
    key = KEY.of(request)
    assert key is not None, "it is in the path"
    return key


@route(
    "PUT",
    _PATH,
    *BLOCKS,
    KEY,
    *HEAD,
    *PLACED,
    PREFER,
    body=BLOCK,
    replies={
        201: reply("It was stored.", BlockResult, **APPLIED),
        200: reply("There was no need to, or no room; `reason` says why.", BlockResult, **APPLIED),
    },
    raises=(BlockMismatch, NotFound, DeadlineExceeded, StoreFailed, StoreFull),
)
async def put(request: web.Request) -> web.Response:
    """Store a block, from the body or out of a region."""
    refuse_if_stopping(request)
    target, limits = Target.of(request), request.app[LIMITS]
    place, head = placed(request), head_of(request)
    media_type(request)
    nbytes = declared(request, "block", limits.block_bytes)
    durable = wants_durable(request)
    part: Part | None = None
    if place:
        if nbytes:
            raise BadRequest("body", "must be empty: the bytes are in the region")
        part = request.app[REGIONS].part(target.tenant, place.region, place.span)
        nbytes = place.span.length
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
        result,
        status=201 if result.outcome == "stored" else 200,
        headers=applied(durable=durable),
    )


@route(
    "GET",
    _PATH,
    *BLOCKS,
    KEY,
    *PLACED,
    replies={
        200: reply("The block; of one that went to a region, what became of it.", BLOCK, Landed, **_ABOUT)
    },
    raises=(NotFound, BlockMismatch, DeadlineExceeded, StoreFailed),
)
async def get(request: web.Request) -> web.StreamResponse:
    """Read a block, into the body or into a region."""
    target, limits = Target.of(request), request.app[LIMITS]
    key, place = key_of(request), placed(request)
    part = request.app[REGIONS].part(target.tenant, place.region, place.span) if place else None
    into = part.destination(limits.stall_s) if part else None
    blocks = request.app[SERVICE].blocks
    async with blocks.read(target.namespace, key, target.salt, target.deadline, into) as lease:
        with request.app[IN_FLIGHT].take(target.tenant, lease.nbytes):
            if part is not None:
                await part.take(lease, limits.stall_s)
                return json_response(Landed(Found(key, lease.tokens, lease.tier), lease.nbytes))
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


@route("HEAD", _PATH, *BLOCKS, KEY, replies={200: reply("It is there.", EMPTY, **_ABOUT)}, raises=(NotFound,))
async def head(request: web.Request) -> web.Response:
    """Say what a GET would find. It moves nothing and grants nothing."""
    target, key = Target.of(request), key_of(request)
    prefixes = request.app[SERVICE].prefixes
    await prefixes.look(target.namespace, target.salt, keys=[key])
    (found,) = prefixes.match(target.namespace, [key], target.salt).blocks
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


@route(
    "DELETE", _PATH, *BLOCKS, KEY,
    replies={204: reply("It is gone.", EMPTY)}, raises=(NotFound, DeadlineExceeded, StoreFailed),
)  # fmt: skip
async def delete(request: web.Request) -> web.Response:
    """Remove a block from every tier before the answer, once its readers have finished.

    It is served no more from the beginning; past the deadline, the rest goes on.
    """
    target, key = Target.of(request), key_of(request)
    async with Deadline(target.deadline).bound("the deletion", goes_on=True):
        if not await request.app[SERVICE].blocks.delete(target.namespace, [key], target.salt):
            raise NotFound
    return web.Response(status=204)


def applied(*, durable: bool) -> dict[str, str]:
    """Return the header that says which preference was honoured (RFC 7240)."""
    return {"Preference-Applied": "durable"} if durable else {}
