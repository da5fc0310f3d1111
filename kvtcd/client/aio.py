"""The client for programs with an event loop: the methods of `sync.Client`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from kvtcd.client import endpoints
from kvtcd.client.address import Address
from kvtcd.client.call import Buffer, Call, Options, pauses, room
from kvtcd.client.connections import GRACE_S, PIECE
from kvtcd.core import wire
from kvtcd.core.errors import DeadlineExceeded, NotFound, ServerError, Unavailable
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead, BlockResult, Found, Info, Matches, NamespaceInfo, Operation

T = TypeVar("T")


class AsyncClient:
    """A client of one daemon, for one event loop; see `sync.Client` for what each method does.

    Args:
        address: path of the daemon's socket, or ``http://host:port``; default ``$KVTCD_SOCKET``, else
            ``/run/kvtcd/kvtcd.sock``.
        timeout: seconds for each read and write on the socket.

    Example:
        Read blocks as they come::

            async with AsyncClient() as client:
                async for key, data in client.get_many("demo", keys):
                    ...
    """

    def __init__(self, address: str | Path | None = None, *, timeout: float = 60.0) -> None:
        self.address = Address.of(address)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. The client can still be used."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self.address.socket
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path) if path else aiohttp.TCPConnector(),
                read_bufsize=PIECE,
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        return self._session

    @asynccontextmanager
    async def _exchange(self, call: Call[Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        seconds = max(self._timeout, (call.deadline or 0.0) + GRACE_S)
        try:
            async with await self._send(
                call, aiohttp.ClientTimeout(sock_connect=seconds, sock_read=seconds)
            ) as answer:
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise self.address.unavailable(error.os_error) from None
        except TimeoutError:
            raise DeadlineExceeded("the daemon's answer", seconds) from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"the daemon on {self.address} broke off: {error!r}") from None

    async def _send(self, call: Call[Any], limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        url = URL(f"http://{self.address.host}:{self.address.port}{call.path}", encoded=True)
        headers = dict(call.headers)
        if call.body:
            headers["Content-Length"] = str(call.nbytes)

        async def once() -> aiohttp.ClientResponse:
            body = _pieces(call) if call.body else None
            return await self._connected().request(
                call.method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
            )

        try:
            return await once()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # A kept connection that the daemon had closed meanwhile.
            if not call.repeatable or isinstance(error, aiohttp.ClientConnectorError):
                raise
            return await once()

    async def _run(self, call: Call[T]) -> T:
        async with self._exchange(call) as answer:
            return call.answer(answer.status, await answer.read())

    async def info(self) -> Info:
        """Return versions and boot id."""
        return await self._run(endpoints.info())

    async def ready(self) -> bool:
        """Tell whether a daemon is there, and serves and takes blocks."""
        try:
            return await self._run(endpoints.ready())
        except (Unavailable, ServerError):
            return False

    async def stats(self) -> dict[str, Any]:
        """Return the state of the daemon."""
        return await self._run(endpoints.stats())

    async def register(self, name: str, identity: Identity) -> NamespaceInfo:
        """Register a namespace; once more with the same identity changes nothing."""
        return await self._run(endpoints.register(name, identity))

    async def namespace(self, name: str) -> NamespaceInfo:
        """Describe a namespace."""
        return await self._run(endpoints.namespace(name))

    async def namespaces(self) -> tuple[NamespaceInfo, ...]:
        """Describe all namespaces of the caller."""
        return await self._run(endpoints.namespaces())

    async def purge(self, name: str) -> int:
        """Remove a namespace and every byte of its blocks, durably; return how many blocks there were."""
        return await self._run(endpoints.purge(name))

    async def match(
        self, name: str, keys: Iterable[bytes], *, salt: bytes = b"", deadline: float | None = None
    ) -> Matches:
        """Say of each key whether its block is there, and in which tier."""
        return await self._run(endpoints.match(name, keys, Options(salt, deadline)))

    async def match_tokens(
        self, name: str, tokens: Sequence[int], *, salt: bytes = b"", deadline: float | None = None
    ) -> Matches:
        """Find the longest stored prefix of a token sequence under our own key chain."""
        return await self._run(endpoints.match_tokens(name, tokens, Options(salt, deadline)))

    async def put(
        self,
        name: str,
        block: BlockHead,
        data: Buffer,
        *,
        durable: bool = False,
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> BlockResult:
        """Store a block of raw bytes; with `durable`, return once it is on disk."""
        return await self._run(endpoints.put(name, block, data, Options(salt, deadline), durable=durable))

    async def put_many(
        self,
        name: str,
        blocks: Iterable[tuple[BlockHead, Buffer]],
        *,
        durable: bool = False,
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> tuple[BlockResult, ...]:
        """Store blocks; without parents of their own they continue each other in order. A result for each."""
        results: list[BlockResult] = []
        for group in endpoints.groups(blocks):
            call = endpoints.put_group(name, group, Options(salt, deadline), durable=durable)
            results += await self._run(call)
        return tuple(results)

    async def get(
        self,
        name: str,
        key: bytes,
        *,
        out: bytearray | memoryview | None = None,
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> memoryview:
        """Return the raw bytes of a block, in `out` if given: a buffer that is used again saves much time."""
        call = endpoints.get(name, key, Options(salt, deadline))
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
        self, name: str, keys: Iterable[bytes], *, salt: bytes = b"", deadline: float | None = None
    ) -> AsyncIterator[tuple[EngineKey, memoryview | None]]:
        """Yield each key with the raw bytes of its block, or None for a miss, in the order asked for."""
        call = endpoints.get_many(name, keys, Options(salt, deadline))
        async with self._exchange(call) as answer:
            if answer.status >= 400:
                call.answer(answer.status, await answer.read())
            parser = wire.FrameParser(endpoints.MAX_FRAME)
            found, view, filled = None, memoryview(b""), 0
            while piece := await answer.content.readany():
                for part in parser.feed(piece):
                    if isinstance(part, wire.Head):
                        found = Found.from_json(part.header)
                        view, filled = memoryview(bytearray(part.nbytes)), 0
                        if found.tier is None:
                            yield found.key, None
                    else:
                        assert found is not None, "a head comes before its body"
                        view[filled : filled + len(part)] = part
                        filled += len(part)
                        if filled == len(view):
                            yield found.key, view
            parser.finish()

    async def delete(
        self, name: str, key: bytes, *, salt: bytes = b"", deadline: float | None = None
    ) -> bool:
        """Remove a block from every tier; tell whether there was one."""
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
        salt: bytes = b"",
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
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> Operation:
        """Move blocks to disk and out of host memory; with `wait`, return once that has ended."""
        operation = await self._run(endpoints.demote(name, keys, Options(salt, deadline)))
        for pause in pauses():
            if not wait or operation.state != "running":
                break
            await asyncio.sleep(pause)
            operation = await self.operation(operation.id)
        return operation

    async def operation(self, operation_id: str) -> Operation:
        """Return an operation as it is now."""
        return await self._run(endpoints.operation(operation_id))


async def _pieces(call: Call[Any]) -> AsyncIterator[memoryview]:
    """Yield a body in pieces: one large body would be copied whole, and block the loop meanwhile."""
    for part in call.body:
        view = memoryview(part)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
