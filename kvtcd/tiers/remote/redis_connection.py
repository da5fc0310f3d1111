"""Connections of redis-py by which a large value is copied once on its way in, and not joined on its way out.

Its own hand each piece that arrives to a stream reader, whose buffer grows by it and stops the transport
whenever it holds 128 KiB, and copy a value twice more when it is whole; to write, they join all that is sent.
Here the bytes of a large value are received into the memory that is returned, and large pieces are
written one after the other. All else is the library's: commands, answers, errors, time limits, TLS.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from redis._parsers import Encoder, _AsyncRESP3Parser
from redis._parsers.socket import SERVER_CLOSED_CONNECTION_ERROR
from redis.asyncio import Connection, SSLConnection
from redis.exceptions import ConnectionError as Gone
from redis.exceptions import InvalidResponse

LARGE = 1 << 16
"""Bytes from which on a value is received by itself; shorter ones come through the stream reader."""
MOST = 1 << 30
"""Bytes of a value that are believed; servers take no more than half of that, unless told otherwise."""
_PIECE = 1 << 20
"""Bytes of one write, of which what the socket does not take at once is copied."""
Parts = tuple[bytes | memoryview, ...]
_NOTHING = memoryview(b"")


class Joined:
    """Parts that are one value in a command, without a copy of them.

    Args:
        parts: one behind the other.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._nbytes = sum(map(len, parts))

    def __len__(self) -> int:
        return self._nbytes


class _Encoder(Encoder):
    def encode(self, value: Any) -> Any:  # noqa: ANN401 - as the library has it
        """Return what a value is in a command, which the library asks only for its length if it is large."""
        if isinstance(value, Joined):
            return value if len(value) >= LARGE else b"".join(value.parts)
        return super().encode(value)  # type: ignore[no-untyped-call]


class Inlet(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """What arrives goes to a stream reader, or to where a large value is to lie.

    Args:
        reader: of the stream.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._reader = reader
        self._passing = memoryview(bytearray(LARGE))
        self._rest = _NOTHING
        self._full: asyncio.Future[None] | None = None

    async def fill(self, target: memoryview) -> None:
        """Receive as many bytes as there are in `target`, once the reader has handed out all it had.

        Raises:
            EOFError: the other side has closed the connection before.
            OSError: it was lost.
        """
        if error := self._reader.exception():
            raise error
        if self._reader.at_eof():
            raise EOFError
        self._rest, self._full = target, asyncio.get_running_loop().create_future()
        try:
            await self._full
        finally:
            self._rest = _NOTHING

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - what asyncio asks for
        """Return where the next bytes go."""
        return self._rest or self._passing

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that have come."""
        if not self._rest:
            self._reader.feed_data(self._passing[:nbytes])
            return
        self._rest = self._rest[nbytes:]
        if not self._rest and self._full and not self._full.done():
            self._full.set_result(None)

    def eof_received(self) -> bool | None:
        """Let who waits for a value know that no more comes."""
        self._lose(EOFError())
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let who waits for a value know that no more comes, and why."""
        self._lose(exc or EOFError())
        super().connection_lost(exc)

    def _lose(self, error: Exception) -> None:
        if self._rest and self._full and not self._full.done():
            self._full.set_exception(error)


class Parser(_AsyncRESP3Parser):
    """The library's, but for large values, which are memory of their own."""

    _kind = b""

    def on_connect(self, connection: Any) -> None:  # noqa: ANN401 - as the library has it
        """Read from a connection that was just made."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._inlet: Inlet = connection.inlet

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        self._kind = line[:1]
        return line

    async def _read(self, length: int) -> Any:  # noqa: ANN401 - bytes, or memory that holds them
        """Return so many bytes, behind which a line ends."""
        interrupted = len(self._buffer) > self._pos  # an answer before was not read to its end
        if self._kind != b"$" or length < LARGE or interrupted or self._stream is None:
            return await super()._read(length)
        if length > MOST:
            raise InvalidResponse(f"Protocol Error: a value of {length} bytes, more than {MOST}")
        value = np.empty(length, dtype=np.uint8).data  # no page of it is there before its bytes come
        try:
            head = await self._stream.read(length)  # all that the reader has, or else what comes next
            value[: len(head)] = head
            if len(head) < length:
                await self._inlet.fill(value[len(head) :])
            end = await self._stream.readexactly(2)
        except EOFError as error:
            raise Gone(SERVER_CLOSED_CONNECTION_ERROR) from error
        except BaseException:  # what comes next is the middle of a value, and must not be taken for an answer
            self._stream.set_exception(Gone("a value was left before all of it had come"))
            raise
        if end != b"\r\n":
            raise InvalidResponse(f"Protocol Error: a value that ends with {end!r}")
        return value


class _Direct(Connection):
    """What both kinds of connections do."""

    inlet: Inlet
    socket_keepalive_options: Any
    _writer: Any

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - the library's
        super().__init__(**options, parser_class=Parser, encoder_class=_Encoder)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        async with asyncio.timeout(self.socket_connect_timeout):
            transport, self.inlet = await loop.create_connection(
                lambda: Inlet(reader), **self._connection_arguments()
            )
        # The next piece is written when nothing waits; at 0, that of TLS would never say that it is so.
        transport.set_write_buffer_limits(high=1, low=0)
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, self.inlet, reader, loop)
        link = transport.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, setting in self.socket_keepalive_options.items():
            link.setsockopt(socket.IPPROTO_TCP, option, setting)

    async def _send_packed_command(self, command: Iterable[bytes | memoryview | Joined]) -> None:
        for part in chain.from_iterable(one.parts if isinstance(one, Joined) else (one,) for one in command):
            whole = memoryview(part)
            for start in range(0, len(whole), _PIECE):
                self._writer.write(whole[start : start + _PIECE])
                await self._writer.drain()


class DirectConnection(_Direct):
    """Over TCP."""


class DirectTLSConnection(_Direct, SSLConnection):
    """Over TLS."""
