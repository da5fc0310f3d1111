"""Many blocks in one body: frames in, frames out, flush, demote."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from support.http import NS, TENANT_HEADER, running, unhurried
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, block, soon

from kvtcd.core import wire
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.core.policy import Evict, Policy

pytestmark = pytest.mark.asyncio
FRAMES = {"Content-Type": wire.MEDIA_TYPE}


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(8, "big"))


def frame(number: int, *, tokens: int = BLOCK_TOKENS, data: bytes | None = None) -> bytes:
    data = block(number, tokens) if data is None else data
    head = BlockHead(key(number), tokens, number * BLOCK_TOKENS, key(number - 1) if number else None)
    return wire.head(head.to_json(), len(data)) + data


async def put(daemon, body: bytes, **headers: str):
    async with daemon.request("POST", f"{NS}/blocks:put", data=body, headers=FRAMES | headers) as answer:
        return answer.status, await answer.json()


async def get(daemon, numbers, **headers: str) -> list[tuple[dict[str, object], bytes]]:
    body = {"keys": [key(number).hex() for number in numbers]}
    async with daemon.request("POST", f"{NS}/blocks:get", json=body, headers=headers) as answer:
        assert answer.status == 200
        assert answer.content_type == wire.MEDIA_TYPE
        parser = wire.FrameParser(1 << 30)
        found: list[tuple[dict[str, object], bytearray]] = []
        async for piece in answer.content.iter_any():
            for part in parser.feed(piece):
                if isinstance(part, wire.Head):
                    found.append((part.header, bytearray()))
                else:
                    found[-1][1].extend(part)
        parser.finish()
        return [(header, bytes(data)) for header, data in found]


def outcomes(answer: dict[str, list[dict[str, str]]]) -> list[tuple[str, str, str | None]]:
    return [(row["key"], row["outcome"], row["reason"]) for row in answer["results"]]


async def test_blocks_of_one_body_are_stored_and_come_back_in_the_order_asked_for():
    async with running() as daemon:
        await daemon.register()
        status, answer = await put(daemon, b"".join(frame(n) for n in range(5)))
        assert status == 200
        assert outcomes(answer) == [(key(n).hex(), "stored", None) for n in range(5)]
        assert daemon.blocks() == 5

        found = await get(daemon, [4, 99, 0, 2])
        assert [header["status"] for header, _ in found] == ["hit", "miss", "hit", "hit"]
        assert [data for _, data in found] == [block(4), b"", block(0), block(2)]
        assert found[0][0] == {
            "key": key(4).hex(),
            "status": "hit",
            "tokens": BLOCK_TOKENS,
            "tier": "host",
        }
        assert found[1][0] == {"key": key(99).hex(), "status": "miss", "tokens": None, "tier": None}


async def test_results_are_per_block():
    async with running() as daemon:
        await daemon.register()
        await put(daemon, frame(1))
        _, answer = await put(daemon, frame(0) + frame(1) + frame(2))
        assert outcomes(answer) == [
            (key(0).hex(), "stored", None),
            (key(1).hex(), "duplicate", None),
            (key(2).hex(), "stored", None),
        ]
        assert [data for _, data in await get(daemon, [0, 1, 2])] == [block(0), block(1), block(2)]


async def test_the_last_block_may_be_partial_and_blocks_come_up_from_disk():
    async with running(policy=Policy("toy")) as daemon:
        await daemon.register()
        await put(daemon, frame(0) + frame(1, tokens=3), Prefer="durable")
        ns = daemon.toy.service.namespace("uid:1", "demo")
        await daemon.toy.service.blocks.demote(ns, [key(0), key(1)], b"", soon())
        found = await get(daemon, [0, 1])
        assert [(h["tier"], h["tokens"], data) for h, data in found] == [
            ("disk", BLOCK_TOKENS, block(0)),
            ("disk", 3, block(1, 3)),
        ]


async def test_an_empty_body_and_no_keys_are_empty_answers():
    async with running() as daemon:
        await daemon.register()
        assert await put(daemon, b"") == (200, {"results": []})
        assert await get(daemon, []) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"garbage that is no frame at all", 400),
        (frame(1)[:-1], 400),
        (frame(1)[:10], 400),
        (frame(1) + b"K", 400),
        (frame(0) + frame(1, data=bytes(BLOCK_BYTES - 1)), 422),
        (wire.head({"key": "ab"}, 1) + b"x", 400),
        (wire.head({"key": "ab", "tokens": 1, "tenant": "uid:0"}, 1) + b"x", 400),
    ],
)
async def test_a_bad_body_stores_nothing_and_gives_its_room_back(body, status):
    async with running() as daemon:
        await daemon.register()
        got, problem = await put(daemon, body)
        assert got == problem["status"] == status
        await daemon.settled()
        assert not daemon.toy.catalog.residents.entries


async def test_too_many_blocks_or_too_many_bytes_are_refused():
    async with running(unhurried(batch_blocks=2, batch_bytes=3 * BLOCK_BYTES)) as daemon:
        await daemon.register()
        tiny = b"".join(frame(n, tokens=1) for n in range(3))
        assert (await put(daemon, tiny))[0] == 400
        assert (await put(daemon, frame(0) + frame(1) + frame(2)))[0] == 413
        async with daemon.request("POST", f"{NS}/blocks:get", json={"keys": ["ab"] * 3}) as answer:
            assert answer.status == 400
        assert daemon.blocks() == 0


async def test_busy_at_the_first_block_refuses_the_request_and_later_only_drops():
    policy = Policy("lru", evict=Evict("lru"))  # every newcomer is worth it
    async with running(host=2 * BLOCK_BYTES, disk=0, policy=policy) as daemon:
        await daemon.register()
        await put(daemon, frame(7) + frame(8))
        ns = daemon.toy.service.namespace("uid:1", "demo")
        async with daemon.toy.service.blocks.read(ns, key(7), b"", soon()):
            async with daemon.toy.service.blocks.read(ns, key(8), b"", soon()):
                status, problem = await put(daemon, frame(0), **{"Kvtcd-Deadline-Ms": "50"})
                assert (status, problem["type"]) == (503, "urn:kvtcd:error:busy")
            status, answer = await put(daemon, frame(0) + frame(1) + frame(2), **{"Kvtcd-Deadline-Ms": "50"})
        assert status == 200
        assert [row[1] for row in outcomes(answer)].count("stored") >= 1
        assert {row[2] for row in outcomes(answer) if row[1] == "dropped"} <= {"busy"}


async def test_what_comes_too_late_is_a_miss():
    async with running(policy=Policy("toy")) as daemon:
        await daemon.register()
        await put(daemon, frame(0) + frame(1), Prefer="durable")
        ns = daemon.toy.service.namespace("uid:1", "demo")
        await daemon.toy.service.blocks.demote(ns, [key(1)], b"", soon())
        (codec,) = daemon.toy.codecs
        original = codec.inflate

        def slow(blob, scratch):
            codec.gate.wait(PATIENCE_S)
            return original(blob, scratch)

        codec.inflate = slow
        codec.gate.clear()
        found = await get(daemon, [0, 1, 0], **{"Kvtcd-Deadline-Ms": "1000"})
        codec.gate.set()
        assert [header["status"] for header, _ in found] == ["hit", "miss", "miss"]


async def test_flush_makes_named_blocks_or_the_whole_namespace_durable():
    async with running(policy=Policy("toy")) as daemon:
        await daemon.register()
        await put(daemon, frame(0) + frame(1) + frame(2))
        async with daemon.request(
            "POST", f"{NS}/blocks:flush", json={"keys": [key(1).hex(), "ff"]}
        ) as answer:
            assert outcomes(await answer.json()) == [
                (key(1).hex(), "stored", None),
                ("ff", "dropped", "not-found"),
            ]
        async with daemon.request("POST", f"{NS}/blocks:flush", json={}) as answer:
            assert len((await answer.json())["results"]) == 3
        entries = daemon.toy.catalog.residents.entries
        assert all(Tier.DISK in daemon.toy.catalog.tiers(k) for k in entries)


async def ended(daemon, operation):
    """Wait until an operation has ended; return it as it is then."""
    while operation["state"] == "running":
        await asyncio.sleep(0.01)
        async with daemon.request("GET", f"/v1/operations/{operation['id']}") as answer:
            operation = await answer.json()
    return operation


async def test_prefetch_brings_blocks_up_a_few_at_a_time_and_pins_none():
    async with running() as daemon:
        await daemon.register()
        ns = daemon.toy.service.namespace("uid:1", "demo")
        body = b"".join(frame(n) for n in range(12))
        assert (await put(daemon, body))[0] == 200
        keys = [key(n) for n in range(12)]
        await daemon.toy.service.blocks.demote(ns, keys, b"", soon())
        wanted = {"keys": [k.hex() for k in (*keys, key(99), keys[0])]}
        most = 0

        def count(_told, _actions):
            nonlocal most
            most = max(most, len(daemon.toy.catalog.residents.transfers))

        daemon.toy.service._driver.observers.append(count)
        async with daemon.request("POST", f"{NS}/prefetch", json=wanted) as answer:
            assert answer.status == 202
            begun = await answer.json()
            assert answer.headers["Location"] == f"/v1/operations/{begun['id']}"
        done = await ended(daemon, begun)
        assert (done["state"], done["done"], done["total"]) == ("done", 13, 13)
        assert outcomes(done) == [(k.hex(), "stored", None) for k in keys] + [
            (key(99).hex(), "dropped", "not-found")
        ]
        found = daemon.toy.service.prefixes.match(ns, keys, b"").blocks
        assert {match.tier for match in found} == {Tier.HOST}
        assert 1 < most <= 4


async def test_a_prefetch_can_be_cancelled_and_outlasts_no_deadline():
    async with running() as daemon:
        await daemon.register()
        ns = daemon.toy.service.namespace("uid:1", "demo")
        assert (await put(daemon, b"".join(frame(n) for n in range(8))))[0] == 200
        keys = [key(n) for n in range(8)]
        await daemon.toy.service.blocks.demote(ns, keys, b"", soon())
        wanted = {"keys": [k.hex() for k in keys]}
        (tenant,) = daemon.toy.service._registry.tenants.values()
        held, read = threading.Event(), tenant.writer.environment.read
        tenant.writer.environment.read = lambda *args: held.wait(PATIENCE_S) and read(*args)
        try:
            async with daemon.request("POST", f"{NS}/prefetch", json=wanted) as answer:
                begun = await answer.json()
            async with daemon.request("DELETE", f"/v1/operations/{begun['id']}") as answer:
                assert (await answer.json())["state"] == "cancelled"
            brief = {"Kvtcd-Deadline-Ms": "50"}
            async with daemon.request("POST", f"{NS}/prefetch", json=wanted, headers=brief) as answer:
                late = await ended(daemon, await answer.json())
            assert outcomes(late) == [(k.hex(), "dropped", "deadline-exceeded") for k in keys]
            async with daemon.request(
                "DELETE", f"/v1/operations/{late['id']}", headers={TENANT_HEADER: "uid:2"}
            ) as answer:
                assert answer.status == 404
        finally:
            held.set()


async def test_demote_is_an_operation_of_its_tenant():
    async with running(policy=Policy("toy")) as daemon:
        await daemon.register()
        await put(daemon, frame(0))
        async with daemon.request("POST", f"{NS}/demote", json={"keys": [key(0).hex()]}) as answer:
            assert answer.status == 202
            operation = await answer.json()
            assert answer.headers["Location"] == f"/v1/operations/{operation['id']}"
        url = f"/v1/operations/{operation['id']}"
        while operation["state"] == "running":
            await asyncio.sleep(0.01)
            async with daemon.request("GET", url) as answer:
                operation = await answer.json()
        assert (operation["state"], outcomes(operation)) == ("done", [(key(0).hex(), "stored", None)])
        (stored,) = daemon.toy.catalog.residents.entries
        assert daemon.toy.catalog.tiers(stored) == (Tier.DISK,)
        async with daemon.request("GET", url, headers={TENANT_HEADER: "uid:2"}) as answer:
            assert answer.status == 404
        async with daemon.request("GET", "/v1/operations/" + "0" * 32) as answer:
            assert answer.status == 404


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("blocks:get", b"{}"),
        ("blocks:get", b"[]"),
        ("blocks:get", b'{"keys":["zz"]}'),
        ("blocks:get", b'{"keys":["ab"],"keys":["cd"]}'),
        ("blocks:get", b"not json"),
        ("blocks:flush", b'{"keys":null}'),
        ("demote", b"{}"),
        ("prefetch?to=disk", b'{"keys":[]}'),
        ("prefetch?to=host&to=gpu", b'{"keys":[]}'),
        ("prefetch?at=host", b'{"keys":[]}'),
        ("match", b"{}"),
    ],
)
async def test_bad_json_is_a_bad_request(verb, body):
    async with running() as daemon:
        await daemon.register()
        headers = {"Content-Type": "application/json"}
        async with daemon.request("POST", f"{NS}/{verb}", data=body, headers=headers) as answer:
            assert answer.status == 400
            assert json.loads(await answer.text())["detail"]
