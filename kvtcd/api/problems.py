"""Every error becomes a problem (RFC 9457), or the end of its connection if the answer has begun."""

from __future__ import annotations

import http
import json
import logging
import math
from collections.abc import Mapping

from aiohttp import web

from kvtcd.api.auth import Handler
from kvtcd.api.state import REFUSALS, TENANT, TRAFFIC
from kvtcd.core.errors import Busy, KvtcdError
from kvtcd.core.problem import MEDIA_TYPE, http_problem, kind_of, problem

_log = logging.getLogger(__name__)
SERVER = "kvtcd"
"""What answers say of who gives them: not which versions of what."""
_TURNED_AWAY = frozenset({401, 403, 421})
_KEPT = ("Allow", "Retry-After", "WWW-Authenticate")
"""Headers of an `HTTPException` that its problem has too."""


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors. Nothing is shown of one that is not meant for clients."""
    try:
        return await handler(request)
    except KvtcdError as error:
        return _answer(request, *_known(error))
    except web.HTTPException as error:
        _say(request, error)
        headers = {name: error.headers[name] for name in _KEPT if name in error.headers}
        body = http_problem(error.status, error.reason, error.text or error.reason)
        answer = _answer(request, body, headers)
        if error.keep_alive is False:
            answer.force_close()
        return answer
    except ConnectionError:
        return _answer(request, http_problem(500, "Connection lost", ""), {})  # for nobody: it cannot be sent
    except Exception:  # noqa: BLE001 - logged here; a client gets a 500 that says nothing else
        _log.exception("unexpected error in %s %s", request.method, request.match_info.route.resource)
        return _answer(request, *_internal())


def _say(request: web.Request, error: web.HTTPException) -> None:
    """Log who was turned away, and why."""
    if error.status not in _TURNED_AWAY:
        return
    peer = request.transport.get_extra_info("peername") if request.transport else None
    request.app[REFUSALS].say(peer, error.status, error.text or "", request.get(TENANT))


def unparsed(status: int, message: str) -> web.Response:
    """Return the answer to a request that is no HTTP, or too long; of its bytes nothing is shown."""
    if status != http.HTTPStatus.BAD_REQUEST:
        return _written(*_internal())
    why = message.partition(":")[0]
    return _written(http_problem(status, "Bad request", f"the request cannot be read: {why}"), {})


def _known(error: KvtcdError) -> tuple[dict[str, object], dict[str, str]]:
    kind = kind_of(error)
    if kind is None:
        _log.error("%s reached a client: %s", type(error).__name__, error)
        return _internal()
    if isinstance(error, Busy):
        return problem(kind, error), {"Retry-After": str(math.ceil(error.retry_after))}
    return problem(kind, error), {}


def _internal() -> tuple[dict[str, object], dict[str, str]]:
    return http_problem(500, "Internal error", "unexpected error; the daemon's log has more"), {}


def _answer(request: web.Request, body: dict[str, object], headers: Mapping[str, str]) -> web.Response:
    if request.writer.output_size and request.transport is not None:
        # Part of an answer is out. Its length is promised, so the only honest end is a broken connection;
        # what is returned below can then no longer be sent.
        request.transport.abort()
    answer = _written(body, headers)
    if request.app[TRAFFIC].closing:
        answer.force_close()
    return answer


def _written(body: dict[str, object], headers: Mapping[str, str]) -> web.Response:
    return web.Response(
        status=int(str(body["status"])),
        body=json.dumps(body).encode(),
        content_type=MEDIA_TYPE,
        headers={**headers, "Server": SERVER},
    )
