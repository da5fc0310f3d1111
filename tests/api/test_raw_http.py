"""Bytes on the socket that no well-behaved client sends: none may store, leak, hang or slip through."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from dataclasses import replace

import pytest
from support.http import NS, Daemon, closed, running, unhurried, until
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon

from kvtcd.api import app
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.core.messages import BlockHead

pytestmark = pytest.mark.asyncio

TARGET = f"{NS}/blocks/abcd?tokens={BLOCK_TOKENS}&first_token=0"
LARGE = replace(IDENTITY, layout=kv_layout(layers=32, kv_heads=8, head_dim=128, dtype=Dtype.BF16))
LARGE_BYTES = LARGE.layout.nbytes(BLOCK_TOKENS)


def put_head(*headers: str, target: str = TARGET, nbytes: int | None = BLOCK_BYTES) -> bytes:
    lines = [f"PUT {target} HTTP/1.1", "Host: kvtcd", "Content-Type: application/octet-stream", *headers]
    if nbytes is not None:
        lines.append(f"Content-Length: {nbytes}")
    return "\r\n".join([*lines, "", ""]).encode()


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/\d\.\d (\d{3}) ", answer)]


SMUGGLED = b"DELETE /v1/namespaces/demo HTTP/1.1\r\nHost: kvtcd\r\n\r\n"
REFUSED_BY_THE_PARSER = {
    "length and chunked": put_head("Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
    "negative length": put_head("Content-Length: -1", nbytes=None) + SMUGGLED,
    "signed length": put_head("Content-Length: +5", nbytes=None) + b"12345" + SMUGGLED,
    "spaced length": put_head("Content-Length: 5 5", nbytes=None) + b"12345" + SMUGGLED,
    "hex length": put_head("Content-Length: 0x5", nbytes=None) + b"12345" + SMUGGLED,
    "two lengths": put_head("Content-Length: 5", nbytes=6) + b"123456" + SMUGGLED,
    "unknown coding": put_head("Transfer-Encoding: gzip, identity", nbytes=None) + SMUGGLED,
    "two hosts": b"GET /v1 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no host": b"GET /v1 HTTP/1.1\r\n\r\n",
    "space before colon": b"GET /v1 HTTP/1.1\r\nHost : a\r\n\r\n",
    "folded header": b"GET /v1 HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
    "bare line feeds": b"GET /v1 HTTP/1.1\nHost: a\n\n",
    "nul in header": b"GET /v1 HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    "long line": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "long header": b"GET /v1 HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
    "many headers": b"GET /v1 HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 200 + b"\r\n",
    "no protocol": b"GET /v1\r\n\r\n",
    "http 2": b"GET /v1 HTTP/2.0\r\nHost: a\r\n\r\n",
    "http 3": b"GET /v1 HTTP/3.0\r\nHost: a\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    "odd method": b"G@T /v1 HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED_BY_THE_PARSER.values(), ids=REFUSED_BY_THE_PARSER)
async def test_what_is_no_http_is_refused_and_the_connection_closed(data, caplog):
    caplog.set_level(logging.INFO)
    async with running() as daemon:
        await daemon.register()
        answer = await daemon.raw(data)
        assert statuses(answer) in ([400], []), answer
        if answer:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"\r\nContent-Type: application/problem+json\r\n" in head
            assert re.findall(rb"\r\nServer: (.*)\r\n", head) == [b"kvtcd"]
            problem = json.loads(body)
            assert (problem["type"], problem["status"]) == ("about:blank", 400)
            assert problem["detail"].startswith(
                ("the request cannot be read: ", "the version of HTTP must be")
            )
            assert "aaa" not in problem["detail"]
        assert daemon.toy.service.namespaces("uid:1"), "nothing was smuggled"
        assert daemon.blocks() == 0
        assert not any(record.exc_info for record in caplog.records if record.name == "kvtcd.api.http")
        said = [line for line in caplog.messages if line.startswith("refused ")]
        assert len(said) == (b"cannot be read" in answer)
        assert all(line.startswith("refused the Unix socket, 400: it cannot be read (") for line in said)
        assert "aaa" not in "".join(said), "nothing that was sent is logged"


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("http://evil.example/v1", {400}),
        ("http://kvtcd/v1", {400}),
        ("//evil.example/v1", {400, 404}),
        ("*", {400, 404, 405}),
        ("kvtcd:80", {400}),
        ("/s/..%2f..%2fetc", {404}),
        ("/v1/../v1", {404}),
        ("/v1/namespaces/demo/blocks/..%2f..%2f..", {400}),
        ("/v1/", {404}),
        ("/v1;x", {404}),
    ],
)
async def test_odd_targets_reach_nothing(target, allowed):
    async with running() as daemon:
        await daemon.register()
        answer = await daemon.raw(
            f"GET {target} HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n".encode()
        )
        assert set(statuses(answer)) <= allowed, answer
        assert statuses(answer)


async def test_the_body_of_a_refused_request_is_never_taken_for_a_request():
    async with running() as daemon:
        await daemon.register()
        for header in ("Content-Encoding: gzip", "Origin: http://evil.example"):
            last = b"GET /healthz HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n"
            answer = await daemon.raw(put_head(header, nbytes=len(SMUGGLED)) + SMUGGLED + last)
            assert statuses(answer) in ([415, 200], [403, 200])
        assert daemon.toy.service.namespaces("uid:1")


async def test_a_chunked_body_is_refused_and_a_bad_chunk_hangs_nothing():
    async with running() as daemon:
        await daemon.register()
        for chunk in (
            b"5\r\nhello\r\n0\r\n\r\n",
            b"zz\r\nhello\r\n",
            b"ffffffffffffffffffff\r\n",
            b"5\r\nhelloXX",
        ):
            answer = await daemon.raw(
                put_head("Connection: close", "Transfer-Encoding: chunked", nbytes=None) + chunk
            )
            assert statuses(answer)[:1] in ([411], [400]), answer
        assert daemon.blocks() == 0


async def test_an_absurd_length_is_refused_at_once():
    async with running() as daemon:
        await daemon.register()
        for nbytes in (99_999_999_999, 2**63, 2**64):
            answer = await daemon.raw(put_head("Connection: close", nbytes=nbytes), upto=b"\r\n\r\n")
            assert statuses(answer) in ([413], [400]), answer
        assert not daemon.toy.catalog.residents.entries


async def test_requests_in_one_packet_are_answered_in_order():
    async with running() as daemon:
        await daemon.register()
        get = f"GET {NS}/blocks/abcd HTTP/1.1\r\nHost: kvtcd\r\nConnection: close\r\n\r\n".encode()
        answer = await daemon.raw(put_head() + block(1) + get)
        assert statuses(answer) == [201, 200]
        assert answer.endswith(block(1))


async def test_continue_is_sent_only_to_those_who_are_welcome():
    async with running() as daemon:
        await daemon.register()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.write(put_head("Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert len(daemon.toy.catalog.residents.entries) == 1, "its room is already taken"
        writer.write(block(1))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201")
        await closed(writer)

        refused = {
            put_head("Expect: 100-continue"): 200,  # a duplicate
            put_head("Expect: 100-continue", nbytes=5): 422,
            put_head("Expect: 100-continue", target=f"{NS}/blocks/abcd"): 400,
            put_head("Expect: 100-continue", nbytes=2**40): 413,
            put_head("Expect: 100-continue", "Origin: null"): 403,
            put_head("Expect: 200-ok"): 417,
        }

        async def first(data: bytes) -> list[int]:
            reader, writer = await asyncio.open_unix_connection(daemon.socket)
            writer.write(data)
            async with asyncio.timeout(PATIENCE_S):
                answer = await reader.readuntil(b"\r\n\r\n")
            await closed(writer)
            return statuses(answer)

        for data, status in refused.items():
            assert await first(data) == [status]
        daemon.toy.service.drain()
        assert await first(put_head("Expect: 100-continue")) == [503]


async def test_a_stalled_body_is_given_up_and_its_room_given_back():
    async with running(unhurried(stall_s=0.2)) as daemon:
        await daemon.register()
        answer = await daemon.raw(put_head() + block(1)[:100])
        assert statuses(answer) == [408]
        await daemon.settled()
        assert not daemon.toy.catalog.residents.entries


async def test_a_body_that_drips_is_given_up():
    async with running(unhurried(stall_s=60, grace_s=0.3, rate=1000)) as daemon:
        await daemon.register()
        reader, writer = await asyncio.open_unix_connection(daemon.socket)
        writer.write(put_head())
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        for byte in range(100):
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        async with asyncio.timeout(PATIENCE_S):
            assert (await answer).startswith(b"HTTP/1.1 408")
        await closed(writer)
        await daemon.settled()
        assert not daemon.toy.catalog.residents.entries


@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_cut_bodies_leak_no_room(how):
    async with running() as daemon:
        await daemon.register()
        data = put_head() + block(1)
        for cut in range(40, len(data), 97):
            reader, writer = await asyncio.open_unix_connection(daemon.socket)
            writer.write(data[:cut])
            if how == "half":
                writer.write_eof()
                await reader.read()
            elif how == "reset":
                writer.transport.abort()
            await closed(writer)
        await daemon.settled()
        assert daemon.blocks() == 0
        assert not daemon.toy.catalog.residents.entries


async def store_large(daemon: Daemon) -> bytes:
    """Store a block that no buffer of a socket takes whole; return the request that asks for it."""
    await daemon.register(LARGE)
    ns = daemon.toy.service.namespace("uid:1", "demo")
    async with daemon.toy.service.blocks.batch(ns, b"", soon()) as batch:
        slot = await batch.reserve(BlockHead(b"\xab\xcd", BLOCK_TOKENS, 0), LARGE_BYTES)
        slot.write(memoryview(bytes(LARGE_BYTES)))
        await batch.commit()
    return f"GET {NS}/blocks/abcd HTTP/1.1\r\nHost: kvtcd\r\n\r\n".encode()


async def test_downloads_that_are_cut_let_go_of_their_block():
    async with running(host=16 * LARGE_BYTES) as daemon:
        get = await store_large(daemon)
        for _ in range(50):
            reader, writer = await asyncio.open_unix_connection(daemon.socket)
            writer.write(get)
            await reader.readexactly(1000)
            writer.transport.abort()
        await daemon.settled()


async def test_a_download_that_is_never_read_lets_go_of_its_block():
    async with running(unhurried(stall_s=0.3), host=16 * LARGE_BYTES) as daemon:
        get = await store_large(daemon)
        stalled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stalled.setblocking(False)
        stalled.connect(str(daemon.socket))
        stalled.sendall(get)
        await until(lambda: daemon.toy.catalog.residents.pins)
        await daemon.settled()
        stalled.close()


async def test_connections_that_say_nothing_or_not_enough_are_closed(monkeypatch):
    monkeypatch.setattr(app, "KEEPALIVE_S", 0.2)
    async with running() as daemon:
        for data in (b"", b"GET /v1 HT", b"GET /healthz HTTP/1.1\r\nHost: kvtcd\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(daemon.socket)
            writer.write(data)
            async with asyncio.timeout(PATIENCE_S):
                await reader.read()
            await closed(writer)


async def test_connections_over_the_limit_are_turned_away_and_others_served():
    async with running(unhurried(connections=2)) as daemon:
        ask, probe = (b"GET %b HTTP/1.1\r\nHost: kvtcd\r\n\r\n" % path for path in (b"/v1", b"/healthz"))
        open_ones = [await asyncio.open_unix_connection(daemon.socket) for _ in range(2)]
        for reader, writer in open_ones:
            writer.write(ask)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        answer = await daemon.raw(ask)
        assert statuses(answer) == [503]
        assert b"Retry-After: 1" in answer
        watched = await daemon.raw(probe)
        assert statuses(watched) == [200], "whoever watches must not take a busy daemon for a dead one"
        assert b"Connection: close" in watched
        for reader, writer in open_ones:
            writer.write(ask)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await closed(writer)
        async with asyncio.timeout(PATIENCE_S):  # until the daemon has seen that they are gone
            while statuses(await daemon.raw(ask, upto=b"}")) != [200]:
                pass
