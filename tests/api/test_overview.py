"""What the daemon says of itself: the last hour, each tenant, the prefixes that are matched most."""

from __future__ import annotations

import pytest
from support.http import NS, TENANT_HEADER, running
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

from kvtcd.client import AsyncClient, BlockHead
from kvtcd.core.errors import ServerError, UnknownNamespace
from kvtcd.core.keys import EngineKey

pytestmark = pytest.mark.asyncio
KEYS = [EngineKey(bytes([n] * 32)) for n in range(4)]


async def traffic(daemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        await client.register("demo", IDENTITY)
        for number, key in enumerate(KEYS[:2]):
            await client.put("demo", BlockHead(key, BLOCK_TOKENS, 0), block(number))
        await client.get("demo", KEYS[0])
        await client.match("demo", KEYS)
        await client.match("demo", KEYS[:1])
        await client.match("demo", KEYS[3:])


async def test_who_asks_is_told_who_he_is():
    async with running() as daemon:
        async with daemon.request("GET", "/v1") as answer:
            body = await answer.json()
        assert (body["tenant"], body["scopes"]) == ("uid:1", ["data", "metrics"])
        async with daemon.request("GET", "/v1", headers={TENANT_HEADER: "uid:0"}) as answer:
            body = await answer.json()
        assert (body["tenant"], body["scopes"]) == ("uid:0", ["admin", "data", "metrics"])


async def test_tenants_are_shown_to_admins_alone():
    async with running() as daemon:
        await traffic(daemon)
        async with daemon.request("GET", "/v1/tenants") as answer:
            assert answer.status == 403
            assert "uid:" not in await answer.text()
        async with daemon.request("GET", "/v1/tenants", headers={TENANT_HEADER: "uid:0"}) as answer:
            (row,) = (await answer.json())["tenants"]
        raw = row["tiers"]["host"]["raw"]
        assert (row["tenant"], row["namespaces"], row["misses"]) == ("uid:1", ["demo"], 0)
        assert (raw["blocks"], raw["bytes"], raw["hits"]) == (2, 2 * BLOCK_BYTES, 1)
        async with AsyncClient(daemon.socket) as client:
            with pytest.raises(ServerError, match="admin"):
                await client.tenants()


async def test_prefixes_are_the_callers_own():
    async with running() as daemon:
        await traffic(daemon)
        async with AsyncClient(daemon.socket) as client:
            found = await client.prefixes()
            assert found == await client.prefixes("demo")
            with pytest.raises(UnknownNamespace):
                await client.prefixes("other")
        assert found == [{"namespace": "demo", "key": KEYS[0].hex(), "matches": 2, "over": 0, "blocks": 2}]
        async with daemon.request("GET", "/v1/prefixes", headers={TENANT_HEADER: "uid:2"}) as answer:
            assert await answer.json() == {"prefixes": []}
        async with daemon.request("GET", "/v1/prefixes?name=demo") as answer:
            assert answer.status == 400
        async with daemon.request("GET", f"{NS}/prefixes") as answer:
            assert answer.status == 404


async def test_the_history_begins_with_the_start():
    async with running() as daemon, AsyncClient(daemon.socket) as client:
        history = await client.history()
    assert history["every_s"] == 10
    first = history["samples"][0]
    assert (first["misses"], set(first["tiers"])) == (0, {"host", "disk"})
    assert 0 <= first["uptime_s"] < 10
