"""Routes of many blocks: put and get in frames, flush, demote, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from aiohttp import web

from kvtcd.api.blocks import applied
from kvtcd.api.bodies import JSON, declared, json_response, read_json, receive, require_type, send
from kvtcd.api.parameters import Target, only, refuse_if_stopping, wants_durable
from kvtcd.api.regions import Regions
from kvtcd.api.state import IN_FLIGHT, LIMITS, OPERATIONS, REGIONS, SERVICE, TENANT
from kvtcd.core import wire
from kvtcd.core.errors import BadRequest, Busy, DeadlineExceeded
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead, BlockResult, Found, keys_from_json, results_to_json
from kvtcd.core.place import Tier
from kvtcd.core.regions import Landed, RegionGet, RegionPut, landed_to_json
from kvtcd.engine.blocks import READ_AHEAD
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.sessions import Batch, Slot

Begin = Callable[
    [Namespace, Sequence[EngineKey], bytes, float, Callable[[], None]],
    Coroutine[Any, Any, Sequence[BlockResult]],
]
"""What an operation on blocks does: namespace, keys, salt, deadline, progress."""


async def put(request: web.Request) -> web.Response:
    """``POST …/blocks:put``: a frame for each block, or its place in a region; a result for each block."""
    refuse_if_stopping(request)
    target, limits = Target.of(request), request.app[LIMITS]
    durable = wants_durable(request)
    if require_type(request, wire.MEDIA_TYPE, JSON) == JSON:
        source: _Frames | _Placed = _Placed(
            target.tenant, request.app[REGIONS], limits.stall_s, await read_json(request)
        )
    else:
        source = _Frames(request, declared(request, "batch", limits.batch_bytes), limits.block_bytes)
    with request.app[IN_FLIGHT].take(target.tenant, source.nbytes):
        async with request.app[SERVICE].blocks.batch(
            target.namespace, target.salt, target.deadline, durable=durable
        ) as batch:
            filling = _Filling(batch, limits.batch_blocks)
            await source.fill(filling)
            results = filling.in_order(await batch.commit())
    return json_response(results_to_json(results), headers=applied(durable=durable))


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

    def __init__(self, tenant: str, regions: Regions, patience: float, body: object) -> None:
        asked = RegionPut.from_json(body)
        self._patience = patience
        self._blocks = [
            (head, span.length, regions.part(tenant, asked.region, span)) for head, span in asked.blocks
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


async def get(request: web.Request) -> web.StreamResponse:
    """``POST …/blocks:get``: a frame for each key, in order; what cannot be had in time is a miss.

    What is asked for into a region is written there, and the answer says what became of it.
    """
    target, limits = Target.of(request), request.app[LIMITS]
    body = await read_json(request)
    if "region" in body:
        return await _into_region(request, target, RegionGet.from_json(body))
    keys = _bounded(request, keys_from_json(body))
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
    keys = _bounded(request, [key for key, _ in asked.blocks])
    parts = [request.app[REGIONS].part(target.tenant, asked.region, span) for _, span in asked.blocks]
    landed = []
    with request.app[IN_FLIGHT].take(target.tenant, _read_ahead(target, keys)), suppress(DeadlineExceeded):
        leases = request.app[SERVICE].blocks.read_many(target.namespace, keys, target.salt, target.deadline)
        async with aclosing(leases):
            async for key, lease in leases:
                if lease is None:
                    landed.append(Landed(Found(key)))
                else:
                    await parts[len(landed)].take(lease, request.app[LIMITS].stall_s)
                    landed.append(Landed(Found(key, lease.tokens, lease.tier), lease.nbytes))
    landed += [Landed(Found(key)) for key in keys[len(landed) :]]
    return json_response(landed_to_json(landed))


def _read_ahead(target: Target, keys: Sequence[EngineKey]) -> int:
    """Return the bytes of host memory that reading some blocks holds at once."""
    identity = target.namespace.identity
    return min(len(keys), READ_AHEAD) * identity.layout.nbytes(identity.block_tokens)


async def flush(request: web.Request) -> web.Response:
    """``POST …/blocks:flush``: on disk before the answer; without ``keys``, the whole namespace."""
    target = Target.of(request)
    body = await read_json(request)
    keys = _bounded(request, keys_from_json(body)) if body else None
    results = await request.app[SERVICE].blocks.flush(target.namespace, keys, target.salt, target.deadline)
    return json_response(results_to_json(results))


async def demote(request: web.Request) -> web.Response:
    """``POST …/demote``: to disk and out of the host tier, as an operation."""
    return await _operation(request, request.app[SERVICE].blocks.demote)


async def prefetch(request: web.Request) -> web.Response:
    """``POST …/prefetch``: up to a tier of memory ahead of need, as an operation."""
    name = only(request, "to").get("to", Tier.HOST)
    if name not in (Tier.HOST, Tier.GPU):
        raise BadRequest("to", f"{name!r} is neither host nor gpu")
    return await _operation(request, partial(request.app[SERVICE].blocks.prefetch, tier=Tier(name)))


async def _operation(request: web.Request, begin: Begin) -> web.Response:
    target = Target.of(request, request.app[LIMITS].max_deadline_s)
    keys = list(dict.fromkeys(await _keys(request)))

    def work(progress: Callable[[], None]) -> Coroutine[Any, Any, Sequence[BlockResult]]:
        return begin(target.namespace, keys, target.salt, target.deadline, progress)

    operation = request.app[OPERATIONS].start(target.tenant, len(keys), work)
    location = {"Location": f"/v1/operations/{operation.id}"}
    return json_response(operation.to_json(), status=202, headers=location)


async def operation(request: web.Request) -> web.Response:
    """``GET /v1/operations/{id}``: how far an operation is."""
    found = request.app[OPERATIONS].find(request[TENANT], request.match_info["id"])
    return json_response(found.to_json())


async def cancel(request: web.Request) -> web.Response:
    """``DELETE /v1/operations/{id}``: end it; what it has done stays done."""
    found = await request.app[OPERATIONS].cancel(request[TENANT], request.match_info["id"])
    return json_response(found.to_json())


async def _keys(request: web.Request) -> list[EngineKey]:
    return _bounded(request, keys_from_json(await read_json(request)))


def _bounded(request: web.Request, keys: list[EngineKey]) -> list[EngineKey]:
    most = request.app[LIMITS].batch_blocks
    if len(keys) > most:
        raise BadRequest("keys", f"{len(keys)} of them; at most {most} in one request")
    return keys
