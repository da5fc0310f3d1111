"""The page for people: its files, served from memory, and what a browser may ask because of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from kvtcd.api.route import EMPTY, Body, Parameter, reply, route
from kvtcd.core.forms import Pattern, text

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
READS = frozenset(
    f"/v1{rest}"
    for rest in (
        "", "/events", "/history", "/namespaces", "/policies", "/prefixes", "/stats", "/tenants",
    )
)  # fmt: skip
"""What the page asks for. None of it changes anything, and none has the bytes of a block."""


class File(NamedTuple):
    """One file of the page; `etag` names its bytes."""

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, path: Path) -> File:
        """Read a file."""
        body = path.read_bytes()
        return cls(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])


def _files() -> dict[str, File]:
    found = {f"/page/{path.name}": File.of(path) for path in Path(__file__).with_name("page").iterdir()}
    return {"/": found.pop("/page/index.html"), **found}


FILES = _files()
"""By path. They are the same for everybody and say nothing of this daemon, so they take no token."""


def admits(request: web.Request) -> bool:
    """Tell whether what a browser asks for is the page, or something that the page shows.

    The latter is only for the page itself: by TCP, where `Host` is known to be ours, from our own origin as
    the browser says, and with a token, which no other page could have.
    """
    if request.method != "GET":
        return False
    if request.path in FILES:
        return True
    headers, own = request.headers, f"{request.scheme}://{request.host}"
    local = request.transport.get_extra_info("sockname") if request.transport else None
    return (
        isinstance(local, tuple)
        and request.path in READS
        and headers.getall("Sec-Fetch-Site", []) == ["same-origin"]
        and headers.get("Origin", own) == own
        and "Authorization" in headers
    )


FILE = Parameter("file", "path", text(Pattern("[a-z]+[.][a-z]+")), "Name of the file.", required=True)
KNOWN = Parameter("If-None-Match", "header", text(), "Entity tags of what the caller has already.")
_HTML, _CSS, _JS = (Body(media_type, {"type": "string"}) for media_type in _TYPES.values())
_OLD = reply("The caller has it.", EMPTY)


@route("GET", "/", KNOWN, replies={200: reply("The page.", _HTML), 304: _OLD}, public=True)
async def index(request: web.Request) -> web.Response:
    """Show the page for people."""
    return _file(request)


@route(
    "GET", "/page/{file}", FILE, KNOWN, replies={200: reply("The file.", _CSS, _JS), 304: _OLD}, public=True
)
async def part(request: web.Request) -> web.Response:
    """Give a file that the page consists of."""
    return _file(request)


def _file(request: web.Request) -> web.Response:
    found = FILES.get(request.path)
    if found is None:
        raise web.HTTPNotFound
    fresh = any(tag.value == found.etag for tag in request.if_none_match or ())
    response = web.Response(
        status=304 if fresh else 200, body=None if fresh else found.body, headers=_HEADERS
    )
    response.etag = found.etag
    if not fresh:
        response.content_type, response.charset = found.media_type, "utf-8"
    return response
