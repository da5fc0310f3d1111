"""Routes of many blocks: put and get in frames, flush, demote, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from kvtcd.api.blocks import applied
from kvtcd.api.bodies import declared, json_response, read_json, receive, require_type, send
from kvtcd.api.parameters import Target, only, refuse_if_stopping, wants_durable
from kvtcd.api.state import IN_FLIGHT, LIMITS, OPERATIONS, SERVICE, TENANT
from kvtcd.core import wire
from kvtcd.core.errors import BadRequest, Busy, DeadlineExceeded
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead, BlockResult, Found, keys_from_json, results_to_json
from kvtcd.core.place import Tier
from kvtcd.engine.blocks import READ_AHEAD
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.sessions import Batch, Slot

Begin = Callable[
    [Namespace, Sequence[EngineKey], bytes, float, Callable[[], None]],
    Coroutine[Any, Any, Sequence[BlockResult]],
]
"""What an operation on blocks does: namespace, keys, salt, deadline, progress."""


async def put(request: web.Request) -> web.Response:
    """``POST …/blocks:put``: a frame for each block, a result for each block."""
    refuse_if_stopping(request)
    target, limits = Target.of(request), request.app[LIMITS]
    require_type(request, wire.MEDIA_TYPE)
    nbytes = declared(request, "batch", limits.batch_bytes)
    durable = wants_durable(request)
    with request.app[IN_FLIGHT].take(target.tenant, nbytes):
        async with request.app[SERVICE].blocks.batch(
            target.namespace, target.salt, target.deadline, durable=durable
        ) as batch:
            filling = _Filling(batch, limits.batch_blocks)
            parser = wire.FrameParser(limits.block_bytes)
            async for piece in receive(request):
                for part in parser.feed(piece):
                    if isinstance(part, wire.Head):
                        await filling.begin(part)
                    else:
                        filling.write(part)
            parser.finish()
            results = filling.in_order(await batch.commit())
    return json_response(results_to_json(results), headers=applied(durable=durable))


class _Filling:
    """Puts the frames of one body into a batch.

    A bound that is met at the first block refuses the whole request. Later ones are dropped instead, since
    what came before them is worth keeping.
    """

    def __init__(self, batch: Batch, most: int) -> None:
        self._batch, self._most = batch, most
        self._keys: list[EngineKey] = []
        self._overflow: list[BlockResult] = []
        self._slot: Slot | None = None

    async def begin(self, head: wire.Head) -> None:
        block = BlockHead.from_json(head.header)
        if len(self._keys) == self._most:
            raise BadRequest("body", f"more than {self._most} blocks")
        self._keys.append(block.key)
        self._slot = None
        if not self._overflow:
            try:
                self._slot = await self._batch.reserve(block, head.nbytes)
            except Busy:
                if len(self._keys) == 1:
                    raise
            else:
                return
        self._overflow.append(BlockResult(block.key, "dropped", "busy"))

    def write(self, data: memoryview) -> None:
        if self._slot is not None:
            self._slot.write(data)

    def in_order(self, results: Sequence[BlockResult]) -> list[BlockResult]:
        """Return one result for each key, in the order they came."""
        by_key = {result.key: result for result in (*results, *self._overflow)}
        return [by_key[key] for key in dict.fromkeys(self._keys)]


async def get(request: web.Request) -> web.StreamResponse:
    """``POST …/blocks:get``: a frame for each key, in order; what cannot be had in time is a miss."""
    target, limits = Target.of(request), request.app[LIMITS]
    keys = await _keys(request)
    identity = target.namespace.identity
    held = min(len(keys), READ_AHEAD) * identity.layout.nbytes(identity.block_tokens)
    with request.app[IN_FLIGHT].take(target.tenant, held):
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
