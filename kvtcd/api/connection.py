"""A connection, whose requests may be no HTTP at all."""

from __future__ import annotations

from aiohttp import web

from kvtcd.api.problems import unparsed


class Connection(web.RequestHandler):
    """One connection of aiohttp's that answers as the API does what its parser refuses.

    No handler and no middleware ever sees such a request, so this is the only place for it.
    """

    __slots__ = ()

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
