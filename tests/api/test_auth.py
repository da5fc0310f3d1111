"""Whose request it is: peers of the Unix socket by the kernel's word, all others by a token."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import platform
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from support.http import NS, TENANT_HEADER, closed, running, until
from support.patience import PATIENCE_S
from support.toy import BLOCK_TOKENS, IDENTITY, block

from kvtcd import logs
from kvtcd.api import app, auth
from kvtcd.api.admitted import ADMITTED
from kvtcd.api.auth import authenticate
from kvtcd.api.listeners import bind_tcp
from kvtcd.client import AsyncClient, BlockHead
from kvtcd.core.access import Caller, Scope, Token, bearer, digest, new_token
from kvtcd.core.errors import NotFound, ServerError, UnknownNamespace
from kvtcd.core.keys import EngineKey
from kvtcd.core.policy import Policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio

SECRETS = {name: new_token() for name in ("one", "two", "watcher", "operator")}
TOKENS = tuple(
    Token(digest(SECRETS[name].encode()), Caller(tenant, frozenset(scopes)))
    for name, tenant, scopes in [
        ("one", "team-1", {Scope.DATA}),
        ("two", "team-2", {Scope.DATA}),
        ("watcher", "team-1", {Scope.METRICS}),
        ("operator", "team-1", {Scope.ADMIN, Scope.DATA}),
    ]
)
KEY = EngineKey(b"k" * 32)


@asynccontextmanager
async def by_tcp() -> AsyncIterator[int]:
    """Run a daemon that listens on TCP too, and yield its port."""
    async with running(authenticate=authenticate(TOKENS), load=lambda: (Policy("next"),)) as daemon:
        listener = await asyncio.to_thread(bind_tcp, "127.0.0.1", 0)
        await app.Site(daemon.runner, listener.socket).start()
        yield listener.socket.getsockname()[1]


async def ask(port: int, method: str, path: str, *headers: str, host: str | None = None) -> tuple[int, bytes]:
    """Send a request, and return status and answer without what differs each time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host or f'localhost:{port}'}",
        "Connection: close",
        *headers,
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape"))
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    await closed(writer)
    head, _, body = answer.partition(b"\r\n\r\n")
    kept = [line for line in head.split(b"\r\n") if not line.startswith(b"Date:")]
    return int(head.split()[1]), b"\r\n".join([*kept, body])


def by(name: str) -> str:
    return f"Authorization: Bearer {SECRETS[name]}"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("one", {"/v1", "/v1/stats", "/healthz", "/readyz"}),
        ("watcher", {"/metrics", "/healthz", "/readyz"}),
        ("operator", {"/v1", "/v1/stats", "/healthz", "/readyz", "/v1/policies:reload"}),
    ],
)
async def test_a_token_opens_what_its_scopes_say(name, allowed) -> None:
    paths = ("/v1", "/v1/stats", "/metrics", "/healthz", "/readyz", "/v1/policies:reload")
    async with by_tcp() as port:
        for path in paths:
            method = "POST" if path.endswith(":reload") else "GET"
            status, _ = await ask(port, method, path, by(name))
            assert status == (200 if path in allowed else 403), path


async def test_without_a_valid_token_every_answer_by_tcp_is_the_same_whatever_was_wrong() -> None:
    wrong = [
        (),
        ("Authorization: Bearer",),
        ("Authorization: Bearer " + new_token(),),
        (f"Authorization: Bearer {SECRETS['one'][:-1]}",),
        (f"Authorization: Bearer {SECRETS['one']}x",),
        (f"Authorization: Basic {SECRETS['one']}",),
        ("Authorization: Bearer \udcff\udcfe",),
        (f"{TENANT_HEADER}: uid:0",),
        (f"X-Token: {SECRETS['one']}",),
    ]
    async with by_tcp() as port:
        answers = {await ask(port, "GET", "/v1", *headers) for headers in wrong}
        everywhere = {
            (await ask(port, method, path))[0]
            for method, path in [("GET", "/metrics"), ("GET", "/healthz"), ("PUT", NS), ("GET", "/nothing")]
        }
    ((status, answer),) = answers
    assert (status, everywhere) == (401, {401})
    assert b"WWW-Authenticate: Bearer" in answer


async def test_a_host_of_another_name_is_refused_so_that_no_page_gets_here_by_its_own() -> None:
    async with by_tcp() as port:
        hosts = [
            f"localhost:{port}",
            f"127.0.0.1:{port}",
            f"[::1]:{port}",
            "evil.example",
            f"evil.example:{port}",
        ]
        seen = [(await ask(port, "GET", "/v1", by("one"), host=host))[0] for host in hosts]
        page = await ask(port, "GET", "/v1", by("one"), "Origin: http://evil.example")
    assert seen == [200, 200, 200, 421, 421]
    assert page[0] == 403


async def test_two_tokens_of_a_tenant_share_and_those_of_two_tenants_do_not() -> None:
    async with by_tcp() as port:
        address = f"http://127.0.0.1:{port}"
        async with AsyncClient(address, token=SECRETS["one"]) as one:
            await one.register("n", IDENTITY)
            head = BlockHead(KEY, tokens=BLOCK_TOKENS, first_token=0)
            assert (await one.put("n", head, block(1))).outcome == "stored"
        async with AsyncClient(address, token=SECRETS["operator"]) as same:
            assert bytes(await same.get("n", KEY)) == block(1)
        async with AsyncClient(address, token=SECRETS["two"]) as other:
            with pytest.raises(UnknownNamespace):
                await other.get("n", KEY)
            await other.register("n", IDENTITY)
            with pytest.raises(NotFound):
                await other.get("n", KEY)


@pytest.mark.parametrize("left", ["none", "others", "fewer scopes", "another tenant"])
async def test_a_stream_ends_once_its_token_holds_no_more_and_others_go_on(left) -> None:
    first = TOKENS[0].digest
    changed = {
        "none": (),
        "others": TOKENS[1:],
        "fewer scopes": (Token(first, Caller("team-1", frozenset({Scope.METRICS}))),),
        "another tenant": (Token(first, Caller("team-9", frozenset({Scope.DATA}))),),
    }
    tokens = [*TOKENS]
    async with running(authenticate=authenticate(tokens)) as daemon:
        listener = await asyncio.to_thread(bind_tcp, "127.0.0.1", 0)
        await app.Site(daemon.runner, listener.socket).start()
        port = listener.socket.getsockname()[1]

        async def listen(*headers: str, unix: bool = False):
            reader, writer = await (
                asyncio.open_unix_connection(daemon.socket)
                if unix
                else asyncio.open_connection("127.0.0.1", port)
            )
            lines = ["GET /v1/events HTTP/1.1", f"Host: localhost:{port}", *headers]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(b":")
                await reader.readuntil(b"\r\n\r\n")
            return reader, writer

        gone, stays = await listen(by("one")), await listen(unix=True)
        assert daemon.app[ADMITTED].review() == 0
        tokens[:] = changed[left]
        assert daemon.app[ADMITTED].review() == 1
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                await gone[0].read()
        await until(lambda: daemon.toy.service.feeds._feeds["team-1"].listeners == 0)
        assert daemon.app[ADMITTED].review() == 0
        assert not stays[0].at_eof()
        for _, writer in (gone, stays):
            await closed(writer)


async def test_tokens_are_never_shown(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    async with by_tcp() as port:
        address = f"http://127.0.0.1:{port}"
        async with AsyncClient(address, token=SECRETS["one"]) as client:
            await client.info()
            assert SECRETS["one"] not in repr(client.address)
        async with AsyncClient(address, token=SECRETS["one"] + "x") as client:
            with pytest.raises(ServerError) as refused:
                await client.info()
        await ask(port, "GET", "/v1", by("one"), "Content-Encoding: gzip", "Broken header")
    as_json = "\n".join(map(logs.Json().format, caplog.records))
    assert all(secret not in caplog.text + as_json + str(refused.value) for secret in SECRETS.values())
    assert all(secret not in repr(TOKENS) for secret in SECRETS.values())


async def test_who_is_turned_away_is_logged_with_the_reason(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with by_tcp() as port:
        await ask(port, "GET", "/v1", f"Authorization: Bearer {new_token()}")
        await ask(port, "GET", "/metrics", by("one"))
        await ask(port, "GET", "/v1", by("one"), host="evil.example")
        await ask(port, "GET", "/nothing", by("one"))
    lines = [json.loads(logs.Json().format(each)) for each in caplog.records if "refused" in each.msg]
    assert [(line["status"], line["tenant"]) for line in lines] == [(401, None), (403, "team-1"), (421, None)]
    for line in lines:
        host, _, number = line["peer"].rpartition(":")
        assert (host, number.isdecimal()) == ("127.0.0.1", True)
        assert line["reason"] in line["message"]
        assert "evil" not in line["message"], "nothing that was sent is logged"


async def test_a_token_is_found_wherever_it_stands_and_new_ones_are_long() -> None:
    assert bearer(TOKENS, SECRETS["two"].encode()) == Caller("team-2", frozenset({Scope.DATA}))
    assert bearer(TOKENS, SECRETS["one"].encode()) == Caller("team-1", frozenset({Scope.DATA}))
    assert bearer((), b"") is None
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= len("kvtcd_") + 43, "256 bits"


@pytest.mark.parametrize(
    ("uid_map", "uid"),
    [
        ("         0          0 4294967295\n", None),
        ("         0       1000          1\n", 65534),
        ("         0       1000          1\n         1     100000      65536\n", 65534),
        ("", 65534),
    ],
)
async def test_users_that_a_namespace_does_not_know_are_not_taken_for_one(uid_map, uid, monkeypatch) -> None:
    assert auth.unmapped(uid_map, "65534\n") == uid
    monkeypatch.setattr(auth, "_UNMAPPED", uid and os.getuid())
    async with running(authenticate=authenticate(())) as daemon, daemon.request("GET", "/v1") as answer:
        assert answer.status == (401 if uid else 200)


async def test_a_peer_on_the_socket_is_its_uid_whatever_it_says() -> None:
    async with running(authenticate=authenticate(TOKENS)) as daemon:
        await daemon.register(**{TENANT_HEADER: "uid:9", "Authorization": f"Bearer {SECRETS['one']}"})
        assert list(daemon.toy.service._registry.tenants) == [f"uid:{os.getuid()}"]


@pytest.mark.skipif(os.getuid() != 0 or platform.machine() != "x86_64", reason="needs to be another user")
async def test_users_are_told_apart_by_the_kernel_and_only_ours_and_root_may_change_what_holds_for_all() -> (
    None
):
    def ask_as(uid: int, path: Path, method: str, target: str, body: str) -> bytes:
        setresuid = 117  # the bare system call: it changes this thread alone
        libc = ctypes.CDLL(None)
        libc.syscall(setresuid, -1, uid, -1)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(
                    f"{method} {target} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
                )
                return connection.recv(100).split()[1]
        finally:
            libc.syscall(setresuid, -1, 0, -1)

    async with running(authenticate=authenticate(()), load=lambda: (Policy("next"),)) as daemon:
        daemon.socket.parent.chmod(0o711)
        await daemon.register()
        identity = json.dumps(IDENTITY.to_json())
        assert await asyncio.to_thread(ask_as, 65534, daemon.socket, "PUT", NS, identity) == b"200"
        assert list(daemon.toy.service._registry.tenants) == ["uid:0", "uid:65534"]
        reload = (daemon.socket, "POST", "/v1/policies:reload", "")
        assert await asyncio.to_thread(ask_as, 65534, *reload) == b"403"
        assert await asyncio.to_thread(ask_as, 0, *reload) == b"200"
