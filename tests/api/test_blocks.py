"""Single blocks over HTTP; each case looks at the answer and at what the service holds afterwards."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from support.http import NS, TENANT_HEADER, closed, running, unhurried, until
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon

from kvtcd.api.state import IN_FLIGHT
from kvtcd.core.place import Tier
from kvtcd.core.policy import Policy

pytestmark = pytest.mark.asyncio
OCTETS = {"Content-Type": "application/octet-stream"}
KEY = "ab" * 32


def path(key: str = KEY, **query: object) -> str:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return f"{NS}/blocks/{key}" + (f"?{text}" if text else "")


def put(daemon, key=KEY, data=None, headers=(), **query):
    data = block(1) if data is None else data
    query = query or {"tokens": BLOCK_TOKENS, "first_token": 0}
    return daemon.request("PUT", path(key, **query), data=data, headers=OCTETS | dict(headers))


async def test_a_block_is_stored_once_and_comes_back():
    async with running() as daemon:
        await daemon.register()
        async with put(daemon) as first:
            assert (first.status, await first.json()) == (
                201,
                {"key": KEY, "outcome": "stored", "reason": None},
            )
        async with put(daemon, data=block(2)) as again:
            assert (again.status, (await again.json())["outcome"]) == (200, "duplicate")
        async with daemon.request("GET", path()) as got:
            assert got.status == 200
            assert await got.read() == block(1)
            assert got.headers["Content-Length"] == str(BLOCK_BYTES)
            assert got.headers["Content-Type"] == "application/octet-stream"
            assert (got.headers["Kvtcd-Tokens"], got.headers["Kvtcd-Tier"]) == (str(BLOCK_TOKENS), "host")
        assert daemon.blocks() == 1


async def test_head_says_what_get_would_and_moves_nothing():
    async with running() as daemon:
        await daemon.register()
        async with put(daemon, headers={"Prefer": "respond-async, durable"}) as answer:
            assert answer.headers["Preference-Applied"] == "durable"
        async with daemon.request("POST", f"{NS}/demote", json={"keys": [KEY]}) as answer:
            operation = answer.headers["Location"]
        while True:
            async with daemon.request("GET", operation) as answer:
                if (await answer.json())["state"] == "done":
                    break
            await asyncio.sleep(0.01)
        async with daemon.request("HEAD", path()) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Length"] == str(BLOCK_BYTES)
            assert answer.headers["Kvtcd-Tier"] == "disk"
        (key,) = daemon.toy.catalog.residents.entries
        assert daemon.toy.catalog.tiers(key) == (Tier.DISK,)
        async with daemon.request("GET", path()) as got:
            assert await got.read() == block(1)
            assert got.headers["Kvtcd-Tier"] == "disk"


async def test_delete_removes_a_block_and_then_finds_none():
    async with running() as daemon:
        await daemon.register()
        async with put(daemon):
            pass
        async with daemon.request("DELETE", path()) as first, daemon.request("DELETE", path()) as second:
            assert (first.status, second.status) == (204, 404)
        assert daemon.blocks() == 0


async def test_durable_means_on_disk_before_the_answer():
    async with running(policy=Policy("toy")) as daemon:
        await daemon.register()
        async with put(daemon, headers={"Prefer": "durable"}) as answer:
            assert answer.status == 201
            (key,) = daemon.toy.catalog.residents.entries
            assert Tier.DISK in daemon.toy.catalog.tiers(key)


async def test_missing_foreign_and_unknown_keys_get_the_same_answer():
    async with running() as daemon:
        await daemon.register()
        other = {TENANT_HEADER: "uid:2"}
        await daemon.register(**other)
        async with put(daemon), put(daemon, key="cd", headers={"Kvtcd-Salt": "c2FsdA"}):
            pass
        answers = []
        for key, headers in ((KEY, other), ("ef" * 32, {}), ("cd", {}), (KEY, {"Kvtcd-Salt": "c2FsdA"})):
            for method in ("GET", "DELETE", "HEAD"):
                async with daemon.request(method, path(key), headers=headers) as answer:
                    assert answer.status == 404
                    if method != "HEAD":
                        answers.append((await answer.read(), answer.headers["Content-Type"]))
        assert len(set(answers)) == 1
        assert b'"type": "urn:kvtcd:error:not-found"' in answers[0][0]
        assert daemon.blocks() == 2


async def test_a_salt_parts_blocks_of_one_tenant():
    async with running() as daemon:
        await daemon.register()
        for seed, salt in enumerate(("", "c2FsdA", "c2FsdA==", "_-8")):
            async with put(daemon, data=block(seed), headers={"Kvtcd-Salt": salt}) as answer:
                assert (await answer.json())["outcome"] == ("duplicate" if seed == 2 else "stored")
        for seed, salt in ((0, ""), (1, "c2FsdA"), (3, "_-8")):
            async with daemon.request("GET", path(), headers={"Kvtcd-Salt": salt}) as got:
                assert await got.read() == block(seed)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "tokens"),
        ("?tokens=0", "tokens"),
        ("?tokens=-1", "tokens"),
        ("?tokens=16&tokens=16", "query"),
        ("?tokens=16&parent=XX", "key"),
        ("?tokens=16&first_token=4611686018427387904", "first_token"),
        ("?tokens=16&colour=red", "colour"),
    ],
)
async def test_a_bad_parameter_is_named_before_the_body_is_read(query, field):
    async with running() as daemon:
        await daemon.register()
        async with daemon.request("PUT", path() + query, data=block(1), headers=OCTETS) as answer:
            assert answer.status == 400
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert (await answer.json())["field"] == field
        assert not daemon.toy.catalog.residents.entries


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
async def test_a_body_of_another_length_is_not_a_block(nbytes):
    async with running() as daemon:
        await daemon.register()
        async with put(daemon, data=bytes(nbytes)) as answer:
            assert answer.status == 422
            problem = await answer.json()
            assert problem["type"] == "urn:kvtcd:error:block-mismatch"
            assert str(BLOCK_BYTES) in problem["detail"]
            assert str(nbytes) in problem["detail"]
        assert not daemon.toy.catalog.residents.entries


async def test_more_tokens_than_a_block_has_are_refused():
    async with running() as daemon:
        await daemon.register()
        async with put(daemon, data=block(1, BLOCK_TOKENS + 1), tokens=BLOCK_TOKENS + 1) as answer:
            assert answer.status == 422


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Kvtcd-Salt": "not base64!"}, 400),
        ({"Kvtcd-Salt": "A"}, 400),
        ({"Kvtcd-Salt": "A" * 342}, 400),
        ({"Kvtcd-Deadline-Ms": "0"}, 400),
        ({"Kvtcd-Deadline-Ms": "1e3"}, 400),
        ({"Kvtcd-Deadline-Ms": "-5"}, 400),
        ({"Kvtcd-Deadline-Ms": "600001"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 403),
    ],
)
async def test_bad_headers_are_refused_and_nothing_is_stored(headers, status):
    async with running() as daemon:
        await daemon.register()
        async with put(daemon, headers=headers) as answer:
            assert answer.status == status
            assert (await answer.json())["status"] == status
        assert not daemon.toy.catalog.residents.entries


async def test_a_body_without_length_is_refused():
    async def chunks():
        yield block(1)

    async with running() as daemon:
        await daemon.register()
        async with put(daemon, data=chunks()) as answer:
            assert answer.status == 411
        assert not daemon.toy.catalog.residents.entries


async def test_a_block_over_the_limit_is_refused_by_its_declared_length():
    async with running(unhurried(block_bytes=BLOCK_BYTES - 1)) as daemon:
        await daemon.register()
        async with put(daemon) as answer:
            assert answer.status == 413
            assert (await answer.json())["limit"] == BLOCK_BYTES - 1
        assert not daemon.toy.catalog.residents.entries


async def test_a_block_that_never_fits_the_host_is_dropped_with_its_reason():
    async with running(host=BLOCK_BYTES // 2) as daemon:
        await daemon.register()
        async with put(daemon) as answer:
            assert (answer.status, await answer.json()) == (
                200,
                {"key": KEY, "outcome": "dropped", "reason": "too-large"},
            )


async def test_no_room_in_time_is_busy_and_says_when_to_come_back():
    async with running(host=BLOCK_BYTES) as daemon:
        await daemon.register()
        ns = daemon.toy.service.namespace("uid:1", "demo")
        async with put(daemon):
            pass
        async with (
            daemon.toy.service.blocks.read(ns, bytes.fromhex(KEY), b"", soon()),  # pins the only room
            put(daemon, key="cd", headers={"Kvtcd-Deadline-Ms": "50"}) as answer,
        ):
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["type"] == "urn:kvtcd:error:busy"
        assert daemon.blocks() == 1


async def test_a_client_that_leaves_while_it_waits_for_room_waits_no_longer():
    async with running(host=BLOCK_BYTES) as daemon:
        await daemon.register()
        ns = daemon.toy.service.namespace("uid:1", "demo")
        async with put(daemon):
            pass
        async with daemon.toy.service.blocks.read(ns, bytes.fromhex(KEY), b"", soon()):
            _, writer = await asyncio.open_unix_connection(daemon.socket)
            writer.write(
                f"PUT {path('cd', tokens=BLOCK_TOKENS)} HTTP/1.1\r\nHost: a\r\nContent-Length: {BLOCK_BYTES}"
                "\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
            )
            await until(lambda: daemon.toy.catalog.room.puts)
            await closed(writer)
            await until(lambda: not daemon.toy.catalog.room.puts)
            await until(lambda: not daemon.app[IN_FLIGHT].held)


async def test_a_stopping_daemon_takes_nothing_new_but_still_serves():
    async with running() as daemon:
        await daemon.register()
        async with put(daemon):
            pass
        daemon.toy.service.drain()
        async with put(daemon, key="cd") as answer:
            assert answer.status == 503
            assert "Retry-After" in answer.headers
            assert (await answer.json())["type"] == "urn:kvtcd:error:stopping"
        async with daemon.request("PUT", "/v1/namespaces/new", json=IDENTITY.to_json()) as answer:
            assert answer.status == 503
        async with daemon.request("GET", path()) as got:
            assert await got.read() == block(1)
        assert daemon.blocks() == 1


async def test_an_error_within_a_body_breaks_the_connection_instead_of_lying():
    async with running() as daemon:
        await daemon.register()
        async with put(daemon):
            pass

        class Torn(Exception):
            pass

        def pieces(_self):
            yield memoryview(block(1))[:100]
            raise Torn

        with patch("kvtcd.engine.sessions.Lease.pieces", pieces):
            answer = await daemon.raw(f"GET {path()} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        head, body = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200")
        assert body == block(1)[: len(body)], "nothing else is passed off as bytes of the block"
        assert len(body) <= 100
