"""Routes of many blocks: put and get in frames, flush, demote, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from aiohttp import web

from kvtcd.api.blocks import APPLIED, applied
from kvtcd.api.bodies import declared, json_response, media_type, read_json, receive, send
from kvtcd.api.parameters import (
    BLOCKS,
    MAX_DEADLINE_S,
    OPERATION,
    PREFER,
    Target,
    refuse_if_stopping,
    wants_durable,
)
from kvtcd.api.regions import Regions
from kvtcd.api.route import FRAMES, JSON, Parameter, reply, route
from kvtcd.api.state import IN_FLIGHT, LIMITS, OPERATIONS, REGIONS, SERVICE, TENANT
from kvtcd.core import wire
from kvtcd.core.errors import (
    BadRequest,
    BlockMismatch,
    Busy,
    DeadlineExceeded,
    NotFound,
    StoreFailed,
    StoreFull,
    UnknownNamespace,
)
from kvtcd.core.forms import choice
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead, BlockResult, Everything, Found, Keys, Results
from kvtcd.core.operation import Operation
from kvtcd.core.place import Tier
from kvtcd.core.regions import AllLanded, Landed, RegionGet, RegionPut
from kvtcd.engine.blocks import READ_AHEAD
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.sessions import Batch, Slot

Begin = Callable[
    [Namespace, Sequence[EngineKey], bytes, float, Callable[[], None]],
    Coroutine[Any, Any, Sequence[BlockResult]],
]
"""What an operation on blocks does: namespace, keys, salt, deadline, progress."""
TO = Parameter(
    "to", "query", choice({str(tier): tier for tier in (Tier.HOST, Tier.GPU)}), "The tier; host unless given."
)  # fmt: skip
_NS = "/v1/namespaces/{ns}"
_BEGUN = {202: reply("It has begun.", Operation, Location="Where to ask for it.")}
_FAILS = (BlockMismatch, DeadlineExceeded, StoreFailed, StoreFull)


@route(
    "POST", f"{_NS}/blocks:put", *BLOCKS, PREFER, body=(FRAMES, RegionPut),
    replies={200: reply("One for each block.", Results, **APPLIED)},
    raises=(NotFound, *_FAILS),
)  # fmt: skip
async def put(request: web.Request) -> web.Response:
    """Store blocks: a frame for each, or its place in a region.

    The header of a frame has `key` and `tokens`, and where they apply `first_token`, `parent` and
    `supersedes`. Without `parent` a block continues the one before it.
    """
    refuse_if_stopping(request)
    target, limits = Target.of(request), request.app[LIMITS]
    durable = wants_durable(request)
    source: _Frames | _Placed
    if media_type(request) == JSON:
        asked = await read_json(request, RegionPut)
        source = _Placed(target.tenant, request.app[REGIONS], limits.stall_s, asked)
    else:
        source = _Frames(request, declared(request, "batch", limits.batch_bytes), limits.block_bytes)
    with request.app[IN_FLIGHT].take(target.tenant, source.nbytes):
        async with request.app[SERVICE].blocks.batch(
            target.namespace, target.salt, target.deadline, durable=durable
        ) as batch:
            filling = _Filling(batch, limits.batch_blocks)
            await source.fill(filling)
            results = filling.in_order(await batch.commit())
    return json_response(Results(tuple(results)), headers=applied(durable=durable))


class _Frames:
    """Blocks that come as frames in the body; `nbytes` is the length of that."""

    def __init__(self, request: web.Request, nbytes: int, block_bytes: int) -> None:
        self.nbytes = nbytes
        self._request, self._parser = request, wire.FrameParser(block_bytes)

    async def fill(self, filling: _Filling) -> None:
        async for piece in receive(self._request):
            for part in self._parser.feed(piece):
                if isinstance(part, wire.Head):
                    await filling.begin(BlockHead.from_json(part.header), part.nbytes)
                elif filling.slot is not None:
                    filling.slot.write(part)
        self._parser.finish()


class _Placed:
    """Blocks that lie in a region of the caller; `nbytes` is their size together."""

    def __init__(self, tenant: str, regions: Regions, patience: float, asked: RegionPut) -> None:
        self._patience = patience
        self._blocks = [
            (block.head, block.span.length, regions.part(tenant, asked.region, block.span))
            for block in asked.blocks
        ]
        self.nbytes = sum(length for _, length, _ in self._blocks)

    async def fill(self, filling: _Filling) -> None:
        for head, nbytes, part in self._blocks:
            await filling.begin(head, nbytes)
            if filling.slot is not None:
                await part.fill(filling.slot, self._patience)


class _Filling:
    """Puts the blocks of one request into a batch; `slot` is for the bytes of the last one, if wanted.

    A bound that is met at the first block refuses the whole request. Later ones are dropped instead, since
    what came before them is worth keeping.
    """

    def __init__(self, batch: Batch, most: int) -> None:
        self._batch, self._most = batch, most
        self._keys: list[EngineKey] = []
        self._overflow: list[BlockResult] = []
        self.slot: Slot | None = None

    async def begin(self, block: BlockHead, nbytes: int) -> None:
        if len(self._keys) == self._most:
            raise BadRequest("body", f"more than {self._most} blocks")
        self._keys.append(block.key)
        self.slot = None
        if not self._overflow:
            try:
                self.slot = await self._batch.reserve(block, nbytes)
            except Busy:
                if len(self._keys) == 1:
                    raise
            else:
                return
        self._overflow.append(BlockResult(block.key, "dropped", "busy"))

    def in_order(self, results: Sequence[BlockResult]) -> list[BlockResult]:
        """Return one result for each key, in the order they came."""
        by_key = {result.key: result for result in (*results, *self._overflow)}
        return [by_key[key] for key in dict.fromkeys(self._keys)]


@route(
    "POST", f"{_NS}/blocks:get", *BLOCKS, body=(RegionGet, Keys),
    replies={200: reply("One for each key, in order.", FRAMES, AllLanded)}, raises=(NotFound, *_FAILS),
)  # fmt: skip
async def get(request: web.Request) -> web.StreamResponse:
    """Read blocks: a frame for each, in order; what cannot be had in time is a miss.

    The header of a frame has `key`, `status` (`hit` or `miss`), `tokens` and `tier`. What is asked for into a
    region is written there, and the answer says what became of it.
    """
    target, limits = Target.of(request), request.app[LIMITS]
    asked: Keys | RegionGet = await read_json(request, RegionGet, Keys)
    if isinstance(asked, RegionGet):
        return await _into_region(request, target, asked)
    keys = _bounded(request, asked.keys)
    with request.app[IN_FLIGHT].take(target.tenant, _read_ahead(target, keys)):
        response = web.StreamResponse(headers={"Content-Type": wire.MEDIA_TYPE})
        response.enable_chunked_encoding()
        await response.prepare(request)
        sent = 0
        leases = request.app[SERVICE].blocks.read_many(target.namespace, keys, target.salt, target.deadline)
        try:
            async with aclosing(leases):
                async for key, lease in leases:
                    if lease is None:
                        await send(response, wire.head(Found(key).to_json(), 0), limits)
                    else:
                        found = Found(key, lease.tokens, lease.tier)
                        await send(response, wire.head(found.to_json(), lease.nbytes), limits)
                        for piece in lease.pieces():
                            await send(response, piece, limits)
                    sent += 1
        except DeadlineExceeded:
            for key in keys[sent:]:
                await send(response, wire.head(Found(key).to_json(), 0), limits)
        await response.write_eof()
        return response


async def _into_region(request: web.Request, target: Target, asked: RegionGet) -> web.Response:
    keys = _bounded(request, [block.key for block in asked.blocks])
    parts = [request.app[REGIONS].part(target.tenant, asked.region, block.span) for block in asked.blocks]
    landed, patience = [], request.app[LIMITS].stall_s
    with request.app[IN_FLIGHT].take(target.tenant, _read_ahead(target, keys)), suppress(DeadlineExceeded):
        leases = request.app[SERVICE].blocks.read_many(
            target.namespace,
            keys,
            target.salt,
            target.deadline,
            [part.destination(patience) for part in parts],
        )
        async with aclosing(leases):
            async for key, lease in leases:
                if lease is None:
                    landed.append(Landed(Found(key)))
                else:
                    await parts[len(landed)].take(lease, patience)
                    landed.append(Landed(Found(key, lease.tokens, lease.tier), lease.nbytes))
    landed += [Landed(Found(key)) for key in keys[len(landed) :]]
    return json_response(AllLanded(tuple(landed)))


def _read_ahead(target: Target, keys: Sequence[EngineKey]) -> int:
    """Return the bytes of host memory that reading some blocks holds at once."""
    identity = target.namespace.identity
    return min(len(keys), READ_AHEAD) * identity.layout.nbytes(identity.block_tokens)


@route(
    "POST", f"{_NS}/blocks:flush", *BLOCKS, body=(Keys, Everything),
    replies={200: reply("One for each block.", Results)}, raises=(NotFound, *_FAILS),
)  # fmt: skip
async def flush(request: web.Request) -> web.Response:
    """Have blocks on disk before the answer; without `keys`, the whole namespace."""
    target = Target.of(request)
    asked: Keys | Everything = await read_json(request, Keys, Everything)
    keys = _bounded(request, asked.keys) if isinstance(asked, Keys) else None
    results = await request.app[SERVICE].blocks.flush(target.namespace, keys, target.salt, target.deadline)
    return json_response(Results(tuple(results)))


@route("POST", f"{_NS}/demote", *BLOCKS, body=Keys, replies=_BEGUN, raises=(UnknownNamespace,))
async def demote(request: web.Request) -> web.Response:
    """Begin to move blocks to disk and out of memory."""
    return await _operation(request, request.app[SERVICE].blocks.demote)


@route("POST", f"{_NS}/prefetch", *BLOCKS, TO, body=Keys, replies=_BEGUN, raises=(UnknownNamespace,))
async def prefetch(request: web.Request) -> web.Response:
    """Begin to bring blocks up to a tier of memory ahead of need."""
    tier = TO.of(request) or Tier.HOST
    return await _operation(request, partial(request.app[SERVICE].blocks.prefetch, tier=tier))


async def _operation(request: web.Request, begin: Begin) -> web.Response:
    target = Target.of(request, MAX_DEADLINE_S)
    asked = await read_json(request, Keys)
    keys = list(dict.fromkeys(_bounded(request, asked.keys)))

    def work(progress: Callable[[], None]) -> Coroutine[Any, Any, Sequence[BlockResult]]:
        return begin(target.namespace, keys, target.salt, target.deadline, progress)

    operation = request.app[OPERATIONS].start(target.tenant, len(keys), work)
    location = {"Location": f"/v1/operations/{operation.id}"}
    return json_response(operation, status=202, headers=location)


@route(
    "GET", "/v1/operations/{id}", OPERATION,
    replies={200: reply("As it is now.", Operation)}, raises=(NotFound,),
)  # fmt: skip
async def operation(request: web.Request) -> web.Response:
    """Say how far an operation is."""
    return json_response(request.app[OPERATIONS].find(request[TENANT], str(OPERATION.of(request))))


@route(
    "DELETE", "/v1/operations/{id}", OPERATION,
    replies={200: reply("It has ended.", Operation)}, raises=(NotFound,),
)  # fmt: skip
async def cancel(request: web.Request) -> web.Response:
    """End an operation; what it has done stays done."""
    return json_response(await request.app[OPERATIONS].cancel(request[TENANT], str(OPERATION.of(request))))


def _bounded(request: web.Request, keys: Sequence[EngineKey]) -> Sequence[EngineKey]:
    most = request.app[LIMITS].batch_blocks
    if len(keys) > most:
        raise BadRequest("keys", f"{len(keys)} of them; at most {most} in one request")
    return keys
