"""A connection, whose requests may be no HTTP at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvtcd.api.problems import unparsed


class Connection(web.RequestHandler):
    """One connection of aiohttp's: it answers as the API does what its parser refuses, and says when it ends.

    No handler and no middleware ever sees a request that is no HTTP, so this is the only place for it.

    Args:
        server: whose it is.
        ended: called with the connection once it has ended.
        settings: of aiohttp's `RequestHandler`.
    """

    __slots__ = ("_ended",)

    def __init__(self, server: web.Server, ended: Callable[[Connection], object], **settings: Any) -> None:  # noqa: ANN401 - aiohttp's
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._ended = ended

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
        super().handle_error(request, status, exc, message)
        answer = unparsed(status, message or "")
        answer.force_close()
        return answer
