"""The client for programs with an event loop: the methods of `sync.Client`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from kvtcd.client import endpoints
from kvtcd.client.aio_daemon import AsyncDaemonClient
from kvtcd.client.arguments import engine_keys
from kvtcd.client.call import Options, Salt, flat, room
from kvtcd.client.device import Data, DevicePart, Room, rooms, take_over
from kvtcd.client.groups import groups, on_host
from kvtcd.client.regions import in_region, one_each
from kvtcd.core import wire
from kvtcd.core.errors import NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.core.matches import LeaseInfo, Matches
from kvtcd.core.messages import BlockHead, BlockResult, Found
from kvtcd.core.operation import Operation
from kvtcd.core.place import Tier


class AsyncClient(AsyncDaemonClient):
    """A client of one daemon, for one event loop; see `sync.Client` for what each method does.

    Args:
        address: path of the daemon's socket, or ``http://host:port``; default ``$KVTCD_SOCKET``, else
            ``/run/kvtcd/kvtcd.sock``.
        token: for a daemon that is reached by TCP; default ``$KVTCD_TOKEN``.
        timeout: seconds for each read and write on the socket.

    Example:
        Read blocks as they come::

            async with AsyncClient() as client:
                async for key, data in client.get_many("demo", keys):
                    ...
    """

    async def match(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        all_ranks: bool = False,
        lease: float | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Matches:
        """Say of each key whether its block is there, and in which tier."""
        return await self._run(
            endpoints.match(name, keys, Options(salt, deadline), all_ranks=all_ranks, lease=lease)
        )

    async def match_tokens(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        all_ranks: bool = False,
        lease: float | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Matches:
        """Find the longest stored prefix of a token sequence under our own key chain."""
        return await self._run(
            endpoints.match_tokens(name, tokens, Options(salt, deadline), all_ranks=all_ranks, lease=lease)
        )

    async def pin(
        self,
        name: str,
        keys: Iterable[bytes],
        seconds: float,
        *,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> LeaseInfo:
        """Keep blocks, wherever they are, for so many seconds; all of them or none.

        Raises:
            NotFound: one of them is not there.
            Busy: leases hold as much as they may already.
        """
        return await self._run(endpoints.pin(name, keys, seconds, Options(salt, deadline)))

    async def give_back(self, lease_id: str) -> bool:
        """End a lease; tell whether it was still held."""
        try:
            await self._run(endpoints.give_back(lease_id))
        except NotFound:
            return False
        return True

    async def put(
        self,
        name: str,
        block: BlockHead,
        data: Data,
        *,
        durable: bool = False,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> BlockResult:
        """Store a block of raw bytes; with `durable`, return once it is on disk."""
        options = Options(salt, deadline)
        if loan := await self._lend([data]):
            call = endpoints.put(name, block, loan.only(), options, durable=durable)
            if (stored := await self._on_loan(loan, call)) is not None:
                return stored
        if isinstance(data, DevicePart):
            data = await asyncio.to_thread(data.on_host)
            return await self.put(name, block, data, durable=durable, salt=salt, deadline=deadline)
        return await self._run(endpoints.put(name, block, data, options, durable=durable))

    async def put_many(
        self,
        name: str,
        blocks: Iterable[tuple[BlockHead, Data]],
        *,
        durable: bool = False,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> tuple[BlockResult, ...]:
        """Store blocks; without parents of their own they continue each other in order. A result for each."""
        results: list[BlockResult] = []
        for group in groups(blocks):
            results += await self._put_group(name, group, Options(salt, deadline), durable=durable)
        return tuple(results)

    async def _put_group(
        self, name: str, group: Sequence[tuple[BlockHead, Data]], options: Options, *, durable: bool
    ) -> tuple[BlockResult, ...]:
        if loan := await self._lend([data for _, data in group]):
            asked = loan.put(head for head, _ in group)
            call = endpoints.put_many_placed(name, asked, options, durable=durable)
            if (results := await self._on_loan(loan, call)) is not None:
                return results
        if any(isinstance(data, DevicePart) for _, data in group):
            return await self._put_group(
                name, await asyncio.to_thread(on_host, group), options, durable=durable
            )
        return await self._run(endpoints.put_group(name, on_host(group), options, durable=durable))

    async def get(
        self,
        name: str,
        key: bytes,
        *,
        out: bytearray | memoryview | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> memoryview:
        """Return the raw bytes of a block, in `out` if given: a buffer that is used again saves much time."""
        options = Options(salt, deadline)
        if out is not None and (loan := await self._lend([out])):
            landed = await self._on_loan(loan, endpoints.get_placed(name, key, loan.only(), options))
            if landed is not None:
                return flat(out)[: landed.nbytes]
        call = endpoints.get(name, key, options)
        async with self._exchange(call) as answer:
            if answer.status >= 400:
                call.answer(answer.status, await answer.read())
            view = room(int(answer.headers["Content-Length"]), out)
            filled = 0
            while piece := await answer.content.readany():
                view[filled : filled + len(piece)] = piece
                filled += len(piece)
            return view

    async def get_many(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        out: Sequence[bytearray | memoryview] | None = None,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> AsyncIterator[tuple[EngineKey, memoryview | None]]:
        """Yield each key with the raw bytes of its block, or None for a miss, in the order asked for."""
        keys, options = list(keys), Options(salt, deadline)
        one_each(keys, out)
        if out and (loan := await self._lend(out)):
            asked = loan.get(engine_keys(keys))
            landed = await self._on_loan(loan, endpoints.get_many_placed(name, asked, options))
            if landed is not None:
                for item in in_region(landed, out):
                    yield item
                return
        call = endpoints.get_many(name, keys, options)
        async with self._exchange(call) as answer:
            if answer.status >= 400:
                call.answer(answer.status, await answer.read())
            parser, buffers = wire.FrameParser(endpoints.MAX_FRAME), iter(out or ())
            found, view, filled = None, memoryview(b""), 0
            while piece := await answer.content.readany():
                for part in parser.feed(piece):
                    if isinstance(part, wire.Head):
                        found = Found.from_json(part.header)
                        view, filled = room(part.nbytes, next(buffers, None)), 0
                        if found.tier is None:
                            yield found.key, None
                    else:
                        assert found is not None, "a head comes before its body"
                        view[filled : filled + len(part)] = part
                        filled += len(part)
                        if filled == len(view):
                            yield found.key, view
            parser.finish()

    async def fill(
        self,
        name: str,
        keys: Iterable[bytes],
        out: Sequence[Room],
        *,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> list[int | None]:
        """Read blocks into memory of the host or of a GPU; return how many bytes of each, None for a miss."""
        keys = engine_keys(keys)
        one_each(keys, out)
        if out and (loan := await self._lend(out)):
            call = endpoints.get_many_placed(name, loan.get(keys), Options(salt, deadline))
            if (landed := await self._on_loan(loan, call)) is not None:
                return [one.nbytes if one.found.tier else None for one in landed]
        host = await asyncio.to_thread(rooms, out)
        got = [
            None if data is None else data.nbytes
            async for _, data in self.get_many(name, keys, out=host, salt=salt, deadline=deadline)
        ]
        await asyncio.to_thread(take_over, out, got)
        return got

    async def delete(self, name: str, key: bytes, *, salt: Salt = "", deadline: float | None = None) -> bool:
        """Remove a block from every tier; tell whether there was one.

        Raises:
            DeadlineExceeded: it is served no more, but readers or leases keep its bytes; that goes on.
        """
        try:
            await self._run(endpoints.delete(name, key, Options(salt, deadline)))
        except NotFound:
            return False
        return True

    async def flush(
        self,
        name: str,
        keys: Iterable[bytes] | None = None,
        *,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> tuple[BlockResult, ...]:
        """Return once blocks are on disk; without `keys`, all of the namespace."""
        return await self._run(endpoints.flush(name, keys, Options(salt, deadline)))

    async def demote(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        wait: bool = True,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Operation:
        """Move blocks to disk and out of host memory; with `wait`, return once that has ended."""
        operation = await self._run(endpoints.demote(name, keys, Options(salt, deadline)))
        return await self.ended(operation) if wait else operation

    async def prefetch(
        self,
        name: str,
        keys: Iterable[bytes],
        *,
        to: Tier = Tier.HOST,
        wait: bool = True,
        salt: Salt = "",
        deadline: float | None = None,
    ) -> Operation:
        """Bring blocks up to a tier of memory ahead of need; with `wait`, return once that has ended."""
        operation = await self._run(endpoints.prefetch(name, keys, Options(salt, deadline), to=to))
        return await self.ended(operation) if wait else operation
