"""A link of a given speed to a server on this host."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_PIECE = 1 << 16


@asynccontextmanager
async def slow_link(target: int, rate: float) -> AsyncIterator[int]:
    """Pass connections on to a port on loopback, so many bytes a second each way; yield the port to use."""

    async def pump(reader, writer) -> None:
        loop = asyncio.get_running_loop()
        free = loop.time()
        try:
            while data := await reader.read(_PIECE):
                free = max(free, loop.time()) + len(data) / rate
                await asyncio.sleep(max(0.0, free - loop.time()))
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def passed_on(reader, writer) -> None:
        under_way.add(asyncio.current_task())
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, outer), pump(inner, writer))

    under_way: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(passed_on, "127.0.0.1", 0, limit=_PIECE)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in under_way:  # what is left open would warn whichever test is running then
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
