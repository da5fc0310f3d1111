"""The page over HTTP: its files, and what a browser is let through because of it, and what not."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.http import closed, running
from support.patience import PATIENCE_S

from kvtcd.api import app, page
from kvtcd.api.auth import authenticate
from kvtcd.api.listeners import bind_tcp
from kvtcd.core.access import Caller, Scope, Token, digest, new_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio

SECRET = new_token()
TOKENS = (Token(digest(SECRET.encode()), Caller("team", frozenset({Scope.DATA, Scope.ADMIN}))),)
BEARER = f"Authorization: Bearer {SECRET}"
SAME, CROSS = "Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"
FOLDER = Path(page.__file__).with_name("page")


@asynccontextmanager
async def by_tcp() -> AsyncIterator[int]:
    async with running(authenticate=authenticate(TOKENS)) as daemon:
        listener = await asyncio.to_thread(bind_tcp, "127.0.0.1", 0)
        await app.Site(daemon.runner, listener.socket).start()
        yield listener.socket.getsockname()[1]


async def ask(port: int, method: str, path: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request as a browser might, and return status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    async with asyncio.timeout(PATIENCE_S):
        if path == "/v1/events":
            answer = await reader.readuntil(b"\r\n\r\n")
        else:
            answer = await reader.read()
    await closed(writer)
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


async def test_files_are_for_everybody_and_let_nothing_else_in():
    async with by_tcp() as port:
        for path, file in page.FILES.items():
            for origin in (
                (),
                (CROSS,),
                (SAME, f"Origin: http://127.0.0.1:{port}"),
                ("Sec-Fetch-Site: none",),
            ):
                status, headers, body = await ask(port, "GET", path, *origin)
                assert (status, body) == (200, file.body)
            assert headers["Content-Type"] == f"{file.media_type}; charset=utf-8"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
            assert policy == {
                "default-src": "'none'",
                "script-src": "'self'",
                "style-src": "'self'",
                "connect-src": "'self'",
                "img-src": "'self' data:",
                "frame-ancestors": "'none'",
                "base-uri": "'none'",
                "form-action": "'none'",
            }


async def test_files_that_are_known_are_not_sent_again():
    async with by_tcp() as port:
        _, headers, _ = await ask(port, "GET", "/page/page.js")
        status, again, body = await ask(port, "GET", "/page/page.js", f"If-None-Match: {headers['Etag']}")
        assert (status, body, again["Etag"]) == (304, b"", headers["Etag"])
        status, _, body = await ask(port, "GET", "/page/page.js", 'If-None-Match: "other"')
        assert (status, body) == (200, page.FILES["/page/page.js"].body)


async def test_the_page_brings_nothing_from_elsewhere_and_nothing_inline():
    names = {path.name for path in FOLDER.iterdir()}
    assert {path.removeprefix("/page/") for path in page.FILES} == (names - {"index.html"}) | {"/"}
    for path in FOLDER.iterdir():
        text = await asyncio.to_thread(path.read_text)
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"'`]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
        )
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
    html = page.FILES["/"].body.decode()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", html)


@pytest.mark.parametrize("path", sorted(page.READS))
async def test_the_page_may_read_with_a_token_and_from_its_own_origin_alone(path):
    async with by_tcp() as port:
        own = f"Origin: http://127.0.0.1:{port}"
        for headers, wanted in (
            ((SAME, BEARER), 200),
            ((SAME, own, BEARER), 200),
            ((SAME,), 403),
            ((SAME, "Authorization: Bearer wrong"), 401),
            ((CROSS, BEARER), 403),
            (("Sec-Fetch-Site: same-site", BEARER), 403),
            ((SAME, CROSS, BEARER), 403),
            ((SAME, "Origin: http://evil.example", BEARER), 403),
            ((SAME, f"Origin: http://localhost:{port}", BEARER), 403),
            ((SAME, f"Origin: http://127.0.0.1:{port + 1}", BEARER), 403),
            ((SAME, "Origin: null", BEARER), 403),
            ((own, BEARER), 403),
        ):
            status, answered, body = await ask(port, "GET", path, *headers)
            assert status == wanted, headers
            if wanted == 200:
                assert answered["Cache-Control"] == "no-store"
                assert "Access-Control-Allow-Origin" not in answered
            else:
                assert b"team" not in body
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            status, _, _ = await ask(port, method, path, SAME, own, BEARER, "Content-Length: 0")
            assert status == 403, method


async def test_everything_else_stays_closed_to_the_page_too():
    async with by_tcp() as port:
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/v1/namespaces/n"),
            ("GET", f"/v1/namespaces/n/blocks/{'ab' * 32}"),
            ("DELETE", "/v1/namespaces/n"),
            ("POST", "/v1/policies:reload"),
            ("POST", "/"),
            ("GET", "/v1/"),
            ("GET", "/page/none.js"),
            ("GET", "/page/../v1/stats"),
        ):
            status, _, _ = await ask(port, method, path, SAME, BEARER, "Content-Length: 0")
            assert status == 403, path
        assert (await ask(port, "GET", "/page/none.js"))[0] == 401
        assert (await ask(port, "GET", "/page/none.js", BEARER))[0] == 404


async def test_a_browser_behind_a_tunnel_to_the_unix_socket_gets_files_and_no_figures():
    """`Host` is not checked there, so that a rebound name would pass for our origin."""
    async with running(authenticate=authenticate(TOKENS)) as daemon:
        async with daemon.request("GET", "/") as answer:
            assert answer.status == 200
        headers = {"Sec-Fetch-Site": "same-origin", "Authorization": "Bearer x"}
        async with daemon.request("GET", "/v1/stats", headers=headers) as answer:
            assert answer.status == 403


async def test_the_page_asks_only_for_what_it_may_read():
    asked = set(re.findall(r'"(v1[a-z/]*)"', "".join(file.body.decode() for file in page.FILES.values())))
    assert {f"/{path}" for path in asked} == page.READS


async def test_figures_are_what_others_are_told():
    async with by_tcp() as port:
        _, _, shown = await ask(port, "GET", "/v1", SAME, BEARER)
        _, _, told = await ask(port, "GET", "/v1", BEARER)
        assert json.loads(shown) == json.loads(told)
