"""Requests that were let in and are not over, so that whoever is no longer known does not stay for hours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from kvtcd.api.state import AUTHENTICATE, SCOPES, TENANT
from kvtcd.core.access import Scope


class Admitted:
    """The requests under way. A stream of events is one, and has no end of its own."""

    def __init__(self) -> None:
        self._requests: dict[int, web.Request] = {}

    @contextmanager
    def while_served(self, request: web.Request) -> Iterator[None]:
        """Know a request while it is served."""
        self._requests[id(request)] = request  # a mapping, and so without a hash
        try:
            yield
        finally:
            del self._requests[id(request)]

    def review(self) -> int:
        """End the connections of those who would not be let in as before, now; return how many."""
        revoked = [request for request in self._requests.values() if not _holds(request)]
        for request in revoked:
            if request.transport is not None:
                request.transport.abort()  # what he has not read yet is not for him any more
        return len(revoked)


def _holds(request: web.Request) -> bool:
    """Tell whether a request would be let in now, with all that its caller had."""
    try:
        caller = request.app[AUTHENTICATE](request)
    except web.HTTPUnauthorized:
        return False
    granted: frozenset[Scope] = request[SCOPES]
    return caller.tenant == request[TENANT] and granted <= caller.scopes


ADMITTED = web.AppKey("admitted", Admitted)
