"""A connection, whose requests may be no HTTP at all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from kvtcd.api.problems import unparsed
from kvtcd.api.refusals import Refusals

HEAD_BYTES = 32 << 10
"""Of heads that one connection may have waiting: the one that comes in, and those that are complete. By the
bounds of aiohttp, 128 headers of 8,190 bytes, each of a crowd could hold thirty times as much, and twice."""


class Connection(web.RequestHandler):
    """One connection of aiohttp's: it answers as the API does what its parser refuses, and says when it ends.

    No handler and no middleware ever sees a request that is no HTTP, so this is the only place for it. Nor do
    they see a head that does not end: with more than `HEAD_BYTES` of those the connection is cut.

    Args:
        server: whose it is.
        ended: called with the connection once it has ended.
        refusals: told of what is no HTTP.
        settings: of aiohttp's `RequestHandler`.
    """

    __slots__ = ("_body", "_ended", "_refusals", "_unfinished")

    def __init__(
        self, server: web.Server, ended: Callable[[Connection], object], refusals: Refusals,
        **settings: Any,  # noqa: ANN401 - aiohttp's
    ) -> None:  # fmt: skip
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._ended, self._refusals = ended, refusals
        self._body: StreamReader = EMPTY_PAYLOAD
        self._unfinished = 0

    def data_received(self, data: bytes) -> None:
        """Read on: bodies have bounds of their own, and heads have theirs here."""
        known, inside = self._request_count, not self._body.is_eof()
        super().data_received(data)
        if self._request_count != known:
            self._body, self._unfinished = self._messages[-1][1], 0
            waiting = sum(map(_head_bytes, self._messages))
        else:
            self._unfinished = 0 if inside else self._unfinished + len(data)
            waiting = self._unfinished
        if waiting > HEAD_BYTES and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell that it has ended."""
        super().connection_lost(exc)
        self._ended(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log an error, and return its problem; the connection ends with it."""
        if isinstance(exc, HttpProcessingError) and not request.writer.output_size:
            peer = self.transport.get_extra_info("peername") if self.transport else None
            # What follows a colon or a quotation mark there are bytes of the request.
            why = re.split("[:'\"]", message or "")[0].strip()
            self._refusals.say(peer, status, f"it cannot be read ({type(exc).__name__}: {why})")
        else:
            super().handle_error(request, status, exc, message)
        answer = unparsed(status, message or "")
        answer.force_close()
        return answer


def _head_bytes(message: tuple[object, StreamReader]) -> int:
    """Return how long the headers of a request are; what was no request has none."""
    headers: tuple[tuple[bytes, bytes], ...] = getattr(message[0], "raw_headers", ())
    return sum(len(name) + len(value) for name, value in headers)
