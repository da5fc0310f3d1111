"""Clients that wish the daemon ill: what they get, and that others are served meanwhile.

`test_raw_http.py` has the bytes that are no HTTP, lengths that lie, and bodies that stall.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import sys
from contextlib import suppress

import pytest
from support.hostile import MOST, crowd, room
from support.http import NS, closed, running, unhurried, until
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon

from kvtcd.api import app
from kvtcd.api.connection import HEAD_BYTES, Connection
from kvtcd.api.limits import Limits
from kvtcd.core.errors import NotFound
from kvtcd.core.keys import EngineKey

pytestmark = pytest.mark.asyncio

BLOCK = f"{NS}/blocks/abcd"
OCTETS = {"Content-Type": "application/octet-stream"}


async def store(daemon, path: str = BLOCK) -> None:
    query = f"?tokens={BLOCK_TOKENS}&first_token=0"
    async with daemon.request("PUT", f"{path}{query}", data=block(1), headers=OCTETS) as answer:
        assert answer.status == 201, await answer.text()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"])
async def test_a_body_that_would_unfold_is_refused_unread(coding):
    async with running() as daemon:
        await daemon.register()
        bomb = gzip.compress(bytes(10 << 20))
        for method, path in (("PUT", f"{BLOCK}?tokens=1"), ("POST", f"{NS}/match"), ("PUT", NS)):
            headers = OCTETS | {"Content-Encoding": coding}
            async with daemon.request(method, path, data=bomb, headers=headers) as answer:
                assert answer.status == 415


@pytest.mark.parametrize(
    "target",
    [
        f"{NS}/blocks/%61bcd%00", f"{NS}/blocks/%2e%2e", f"{NS}/blocks/..", f"{NS}/../demo/blocks/abc",
        f"/{NS}/blocks/abcd", f"{NS}//blocks/abcd", f"{NS}/blocks//abcd", f"{NS}/blocks/abcd/",
        f"{NS}%2fblocks/abcd",
        f"{NS}/blocks/ABCD", f"{NS}/blocks/abcd%0d%0aX:1", f"{NS}/blocks/%ff%fe",
        f"{NS}/blocks/" + "ab" * 4000,
        f"{NS}%00/blocks/abcd", f"/v1/namespaces/{'a' * 65}", f"{NS}/blocks/abcd;x", f"{NS}/blocks/\u0430bcd",
        "/page/..%2f..%2fapp.py", "/page/%2e%2e/app.py", "/page/app.py", "/v1/namespaces/%2e%2e/blocks/abcd",
    ],
)  # fmt: skip
async def test_tricks_with_paths_find_nothing(target):
    async with running() as daemon:
        await daemon.register()
        await store(daemon)
        head = f"GET {target} HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n"
        answer = await daemon.raw(head.encode())
        assert answer.split(b" ", 2)[1] in {b"400", b"404"}, answer
        async with daemon.request("GET", BLOCK) as found:
            assert await found.read() == block(1)


async def test_what_another_tenant_has_takes_the_same_way_as_what_nobody_has():
    """The same functions run in the same order, so no clock can tell the two apart."""
    async with running() as daemon:
        service = daemon.toy.service
        mine = await service.register("uid:1", "demo", IDENTITY)
        await service.register("uid:2", "demo", IDENTITY)
        other = {"Test-Tenant": "uid:2"}
        query = f"?tokens={BLOCK_TOKENS}&first_token=0"
        async with daemon.request("PUT", f"{BLOCK}{query}", data=block(1), headers=OCTETS | other) as answer:
            assert answer.status == 201

        async def way(key: bytes) -> list[tuple[str, str]]:
            taken: list[tuple[str, str]] = []

            def note(frame, event, _argument) -> None:
                if "/kvtcd/" in frame.f_code.co_filename:
                    taken.append((event, frame.f_code.co_qualname))

            sys.setprofile(note)
            try:
                found = service.prefixes.match(mine, [EngineKey(key)], b"")
                with pytest.raises(NotFound):
                    async with service.blocks.read(mine, EngineKey(key), b"", soon()):
                        pytest.fail("another's block was served")
            finally:
                sys.setprofile(None)
            assert not found.prefix_blocks
            return taken

        await way(b"\x01\x02")  # what is made once is made
        foreign, unknown = await way(b"\xab\xcd"), await way(b"\xab\xce")
        assert foreign == unknown
        assert len(foreign) > 10, "something ran"


async def test_answers_about_foreign_and_unknown_blocks_are_the_same():
    async with running() as daemon:
        await daemon.register()
        await daemon.register(**{"Test-Tenant": "uid:2"})
        await store(daemon)
        answers = []
        for key in ("abcd", "abce"):
            for method in ("GET", "DELETE", "HEAD"):
                headers = {"Test-Tenant": "uid:2"}
                async with daemon.request(method, f"{NS}/blocks/{key}", headers=headers) as answer:
                    kept = {name: value for name, value in answer.headers.items() if name != "Date"}
                    answers.append((method, answer.status, kept, await answer.read()))
        assert answers[:3] == answers[3:]
        async with daemon.request("GET", BLOCK) as found:
            assert found.status == 200


async def test_the_longest_silent_go_as_others_come_and_those_who_ask_stay(monkeypatch):
    monkeypatch.setattr(app, "SILENT", 4)
    async with running() as daemon:
        asking = await asyncio.open_unix_connection(daemon.socket)
        asking[1].write(b"GET /v1 HTTP/1.1\r\nHost: kvtcd\r\n\r\n")
        await asking[0].readuntil(b"}")
        silent = [await asyncio.open_unix_connection(daemon.socket) for _ in range(6)]
        async with asyncio.timeout(30):
            for reader, _ in silent[:2]:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
        for reader, writer in (asking, *silent[2:]):
            writer.write(b"GET /v1 HTTP/1.1\r\nHost: kvtcd\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        for _, writer in (asking, *silent):
            await closed(writer)


async def test_of_connections_that_have_ended_nothing_is_kept():
    async with running() as daemon:
        for _ in range(50):
            reader, writer = await asyncio.open_unix_connection(daemon.socket)
            writer.write(b"GET /v1 HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n")
            await reader.read()
            await closed(writer)
        gc.collect()
        assert sum(isinstance(each, Connection) for each in gc.get_objects()) <= 2


def unfinished(nbytes: int) -> bytes:
    """Return so many bytes of a head that has not ended."""
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 4000) for number in range(nbytes // 4000 + 1))
    return (b"GET /v1 HTTP/1.1\r\nHost: kvtcd\r\n" + lines)[:nbytes]


@pytest.mark.parametrize(
    "first", [b"", b"GET /v1 HTTP/1.1\r\nHost: kvtcd\r\n\r\n"], ids=["new", "asked before"]
)
async def test_a_head_that_does_not_end_is_cut_before_it_fills_memory(monkeypatch, first):
    monkeypatch.setattr(app, "KEEPALIVE_S", 10 * PATIENCE_S)
    async with running() as daemon:
        await daemon.register()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        if first:
            writer.write(first)
            await reader.readuntil(b"}")
        writer.write(unfinished(HEAD_BYTES - 1))
        await writer.drain()
        server = daemon.runner.server
        await until(
            lambda: any(each._unfinished == HEAD_BYTES - 1 for each in server.connections)
        )  # so much may wait
        writer.write(b"aa")
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        await closed(writer)
        async with daemon.request("GET", "/v1") as answer:
            assert answer.status == 200


async def test_heads_that_wait_behind_an_answer_without_end_are_cut_as_well():
    ask = b"GET %b HTTP/1.1\r\nHost: kvtcd\r\n%b\r\n"
    async with running() as daemon:
        await daemon.register()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.write(ask % (b"/v1/events", b""))
        await reader.readuntil(b"200 OK")
        many = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 4000) for number in range(6))
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                for _ in range(3):
                    writer.write(ask % (b"/v1", many))
                    await writer.drain()
                while await reader.read(1 << 16):
                    pass
        await closed(writer)


async def test_a_large_body_is_not_taken_for_a_head():
    async with running() as daemon:
        await daemon.register()
        nbytes = 4 * HEAD_BYTES
        head = (
            f"POST {NS}/match HTTP/1.1\r\nHost: kvtcd\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {nbytes}\r\n\r\n"
        )
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        for piece in (4096, nbytes, nbytes):  # on one connection; what ends a body is no head either
            writer.write(head.encode())
            await until(lambda: any(not each._body.is_eof() for each in daemon.runner.server.connections))
            for _ in range(nbytes // piece):
                writer.write(bytes(piece))
                await writer.drain()
            answer = await reader.readuntil(b"}")
            assert answer.startswith(b"HTTP/1.1 200"), answer
        await closed(writer)


@pytest.mark.slow
async def test_ten_thousand_connections_keep_nobody_from_being_served():
    size = room(2)
    if size < MOST:
        print(f"{size} connections of {MOST}: more descriptors than this process may have")  # noqa: T201
    loop = asyncio.get_running_loop()
    bounds = unhurried(shutdown_s=2, in_flight=16 * BLOCK_BYTES, tenant_in_flight=8 * BLOCK_BYTES)
    other = {"Test-Tenant": "uid:2"}
    query = f"?tokens={BLOCK_TOKENS}&first_token=0"
    async with running(bounds) as daemon:
        await daemon.register()
        await daemon.register(**other)
        async with daemon.request("PUT", f"{BLOCK}{query}", data=block(1), headers=OCTETS | other) as answer:
            assert answer.status == 201
        members = crowd(daemon.socket, size)
        opened = await loop.run_in_executor(None, members.__enter__)
        try:
            assert len(opened) == size
            # silent ones, those that have asked, and some of those that are just being turned away
            assert len(daemon.runner.server.connections) <= 2 * (app.SILENT + Limits().connections)
            for number in range(20):
                async with daemon.request("GET", "/healthz") as answer:
                    assert answer.status == 200
                async with daemon.request(
                    "POST", f"{NS}/match", json={"keys": ["abcd"]}, headers=other
                ) as answer:
                    assert (await answer.json())["prefix_blocks"] == 1, number
                async with daemon.request("GET", BLOCK, headers=other) as answer:
                    assert len(await answer.read()) == BLOCK_BYTES
        finally:
            await loop.run_in_executor(None, members.__exit__, None, None, None)
