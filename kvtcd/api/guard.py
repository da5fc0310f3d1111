"""What is refused before anything is looked at: browsers, odd requests, too many connections."""

from __future__ import annotations

from aiohttp import HttpVersion10, HttpVersion11, web

from kvtcd.api import page
from kvtcd.api.auth import Handler
from kvtcd.api.state import TLS, TRAFFIC
from kvtcd.core.errors import Stopping

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Answered however many connections there are: whoever watches must not take a busy daemon for a dead one."""


def _is_ours(request: web.Request, port: int) -> bool:
    """Tell whether a client calls us by a name of ours; a page that was bound to our address does not."""
    if request.host in {f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"}:
        return True
    tls = request.app[TLS]
    return tls is not None and tls.speaks_for(request.host, port)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what no client of ours sends.

    A page in a browser must not reach a local daemon, be it by DNS rebinding or a forged form: browsers mark
    their requests with ``Origin`` and ``Sec-Fetch-Site``. Our own page may read what it shows. Bodies are
    counted in bytes as they come, so none may unfold into more (``Content-Encoding``).
    """
    traffic = request.app[TRAFFIC]
    crowded = not traffic.admit(request)
    if crowded and request.path not in PROBES:
        refused = web.HTTPServiceUnavailable(text="too many connections", headers={"Retry-After": "1"})
        refused.force_close()
        raise refused
    if traffic.closing and request.path not in PROBES:
        raise Stopping
    headers = request.headers
    local = request.transport.get_extra_info("sockname") if request.transport else None
    if isinstance(local, tuple) and not _is_ours(request, local[1]):
        raise web.HTTPMisdirectedRequest(text="no such host here; a proxy has to send the one it connects to")
    from_a_page = "Origin" in headers or headers.get("Sec-Fetch-Site", "none") != "none"
    if from_a_page and not page.admits(request):
        raise web.HTTPForbidden(text="requests from web pages are refused")
    if request.version not in {HttpVersion10, HttpVersion11}:
        raise web.HTTPBadRequest(text="the version of HTTP must be 1.0 or 1.1")
    if not request.raw_path.startswith("/"):
        raise web.HTTPBadRequest(text="the request target must be a path")
    if headers.get("Content-Encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(text="bodies must not be compressed")
    if headers.get("Expect", "100-continue").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="only 'Expect: 100-continue' is understood")
    with traffic.under_way():
        response = await handler(request)
    if traffic.closing or crowded:
        response.force_close()
    return response


async def expect_later(request: web.Request) -> None:
    """Send no ``100 Continue`` yet: `bodies.receive` does, once the request is known to be welcome."""
