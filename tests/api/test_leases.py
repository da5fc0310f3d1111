"""Leases: what is leased stays, for as long as was said, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.http import NS, TENANT_HEADER, Daemon, running, until
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon

from kvtcd.core.keys import EngineKey, chain, token_array, tokens_to_bytes
from kvtcd.core.messages import BlockHead
from kvtcd.core.policy import Evict, HostTier, Policy

pytestmark = pytest.mark.asyncio
TIGHT = {"policy": Policy("lru", host=HostTier(high=1.0, low=0.9), evict=Evict("lru")), "disk": 0}


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


async def store(daemon: Daemon, *heads: BlockHead | int, name: str = "demo", tenant: str = "uid:1") -> None:
    """Store blocks one by one."""
    service = daemon.toy.service
    for head in heads:
        one = head if isinstance(head, BlockHead) else BlockHead(key(head), BLOCK_TOKENS, 0)
        ns = service.namespace(tenant, name)
        async with service.blocks.batch(ns, b"", soon()) as batch:
            data = block(one.key[0], one.tokens)
            slot = await batch.reserve(one, len(data))
            if slot is not None:
                slot.write(memoryview(data))
            await batch.commit()


async def post(daemon: Daemon, path: str, body, **headers: str):
    async with daemon.request("POST", f"{NS}/{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def there(daemon: Daemon, *numbers: int) -> str:
    _, found = await post(daemon, "match", {"keys": [key(n).hex() for n in numbers]})
    return found["bitmap"]


async def give_back(daemon: Daemon, lease_id: str, **headers: str) -> int:
    async with daemon.request("DELETE", f"/v1/leases/{lease_id}", headers=headers) as answer:
        return answer.status


def held(daemon: Daemon) -> int:
    return int(daemon.toy.service.metrics.leases._value.get())


async def test_a_leased_block_outlives_those_that_came_after_it_until_it_is_given_back():
    async with running(host=16 * BLOCK_BYTES, **TIGHT) as daemon:
        await daemon.register()
        await store(daemon, 1, 2, 3)
        status, lease = await post(
            daemon, "pin", {"keys": [key(1).hex(), key(2).hex(), key(1).hex()], "seconds": 60}
        )
        assert (status, lease["seconds"], lease["blocks"], held(daemon)) == (201, 60, 2, 1)
        await store(daemon, *range(10, 40))
        assert await there(daemon, 1, 2, 3) == "110"
        assert await give_back(daemon, lease["id"], **{TENANT_HEADER: "uid:2"}) == 404
        assert await give_back(daemon, lease["id"]) == 204
        assert (await give_back(daemon, lease["id"]), held(daemon)) == (404, 0)
        await store(daemon, *range(40, 80))
        assert await there(daemon, 1, 2) == "00"


async def test_a_lease_ends_when_its_time_is_over():
    async with running(host=16 * BLOCK_BYTES, **TIGHT) as daemon:
        await daemon.register()
        await store(daemon, 1)
        status, lease = await post(daemon, "pin", {"keys": [key(1).hex()], "seconds": 0.1})
        assert status == 201
        await until(lambda: held(daemon) == 0)
        assert await give_back(daemon, lease["id"]) == 404
        await store(daemon, *range(10, 40))
        assert await there(daemon, 1) == "0"


async def test_all_of_the_blocks_are_leased_or_none():
    async with running() as daemon:
        await daemon.register()
        await store(daemon, 1)
        status, _ = await post(daemon, "pin", {"keys": [key(1).hex(), key(9).hex()], "seconds": 5})
        assert (status, held(daemon)) == (404, 0)
        assert daemon.toy.service.leases._of == {}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"keys": [key(1).hex()]}, "seconds"),
        ({"keys": [key(1).hex()], "seconds": -1}, "seconds"),
        ({"keys": [key(1).hex()], "seconds": 3601}, "seconds"),
        ({"keys": [key(1).hex()], "seconds": True}, "seconds"),
        ({"keys": [key(1).hex()], "seconds": "5"}, "seconds"),
        ({"keys": [], "seconds": 5}, "keys"),
        ({"keys": [key(1).hex()], "seconds": 5, "for": 1}, "for"),
        ({"seconds": 5}, "keys"),
    ],
)
async def test_what_is_no_lease_is_refused(body, field):
    async with running() as daemon:
        await daemon.register()
        await store(daemon, 1)
        status, answer = await post(daemon, "pin", body)
        assert (status, answer["field"]) == (400, field)


async def test_a_tenant_may_hold_so_many_leases_and_so_many_bytes(monkeypatch):
    async with running(host=16 * BLOCK_BYTES, disk=0) as daemon:
        await daemon.register()
        await store(daemon, *range(1, 7))
        monkeypatch.setattr("kvtcd.engine.leases.COUNT", 2)
        first = await post(daemon, "pin", {"keys": [key(1).hex()], "seconds": 60})
        assert (await post(daemon, "pin", {"keys": [key(2).hex()], "seconds": 60}))[0] == 201
        status, problem = await post(daemon, "pin", {"keys": [key(3).hex()], "seconds": 60})
        assert (status, problem["type"]) == (503, "urn:kvtcd:error:busy")
        assert problem["detail"].startswith("the number of leases of this user is at its bound")
        await give_back(daemon, first[1]["id"])
        monkeypatch.setattr("kvtcd.engine.leases.COUNT", 99)
        many = [key(n).hex() for n in range(3, 6)]
        assert (await post(daemon, "pin", {"keys": many, "seconds": 60}))[0] == 201, "a quarter of 16"
        assert (await post(daemon, "pin", {"keys": [key(6).hex()], "seconds": 60}))[0] == 503
        for tenant, status in (("uid:2", 201), ("uid:3", 503)):
            await daemon.register(**{TENANT_HEADER: tenant})
            await store(daemon, *range(1, 5), tenant=tenant)
            four = {"keys": [key(n).hex() for n in range(1, 5)], "seconds": 60}
            assert (await post(daemon, "pin", four, **{TENANT_HEADER: tenant}))[0] == status, "half for all"
        found = await post(daemon, "match?lease=5", {"keys": [key(1).hex()]}, **{TENANT_HEADER: "uid:3"})
        assert (found[1]["prefix_blocks"], found[1]["lease"]) == (1, None)


async def test_a_match_can_keep_what_it_finds():
    async with running(host=16 * BLOCK_BYTES, **TIGHT) as daemon:
        await daemon.register()
        await store(daemon, 1, 2)
        wanted = {"keys": [key(n).hex() for n in (1, 9, 2)]}
        _, found = await post(daemon, "match?lease=60", wanted)
        assert (found["lease"]["blocks"], found["lease"]["seconds"]) == (1, 60)
        _, nothing = await post(daemon, "match?lease=60", {"keys": [key(9).hex()]})
        assert (nothing["lease"], held(daemon)) == (None, 1)
        await store(daemon, *range(10, 40))
        assert await there(daemon, 1, 2) == "10"
        for wrong in ("0", "-1", "x", "1e3", "99999"):
            status, problem = await post(daemon, f"match?lease={wrong}", wanted)
            assert (status, problem["field"]) == (400, "lease")


@pytest.mark.parametrize("by", ["keys", "tokens"])
async def test_a_match_of_all_ranks_keeps_the_blocks_of_all_of_them(by):
    tokens = list(range(2 * BLOCK_TOKENS + 3))
    async with running(host=24 * BLOCK_BYTES, **TIGHT) as daemon:
        for rank in range(2):
            identity = replace(IDENTITY, parallel=f"tp2-rank{rank}")
            path = f"/v1/namespaces/r{rank}"
            async with daemon.request("PUT", path, json=identity.to_json()) as answer:
                assert answer.status == 200
            links = chain(identity.digest, tokens, BLOCK_TOKENS)
            heads = [BlockHead(ln.key, ln.tokens, ln.first, ln.parent) for ln in links]
            if by == "keys":
                heads = [BlockHead(key(n), BLOCK_TOKENS) for n in (1, 2)]
            await store(daemon, *heads, name=f"r{rank}")
        body = {"json": {"keys": [key(n).hex() for n in (1, 2)]}}
        if by == "tokens":
            octets = {"Content-Type": "application/octet-stream"}
            body = {"data": tokens_to_bytes(token_array(tokens)), "headers": octets}
        path = "/v1/namespaces/r0/match"
        async with daemon.request("POST", f"{path}?ranks=all&lease=60", **body) as answer:
            found = await answer.json()
        assert found["lease"]["blocks"] == 2 * found["prefix_blocks"] == (6 if by == "tokens" else 4)
        await daemon.register()
        await store(daemon, *range(10, 60))
        async with daemon.request("POST", f"{path}?ranks=all", **body) as answer:
            assert (await answer.json())["prefix_tokens"] == found["prefix_tokens"]


async def test_a_deletion_waits_for_leases_and_a_purge_ends_them():
    async with running() as daemon:
        await daemon.register()
        await store(daemon, 1, 2)
        _, lease = await post(daemon, "pin", {"keys": [key(1).hex()], "seconds": 60})
        assert (await post(daemon, "pin", {"keys": [key(2).hex()], "seconds": 60}))[0] == 201
        path, brief = f"{NS}/blocks/{key(1).hex()}", {"Kvtcd-Deadline-Ms": "50"}
        async with daemon.request("DELETE", path, headers=brief) as answer:
            assert answer.status == 504
        assert (await there(daemon, 1), daemon.blocks()) == ("0", 1), "served no more"
        assert len(daemon.toy.catalog.residents.entries) == 2, "but not gone"
        await give_back(daemon, lease["id"])
        await until(lambda: len(daemon.toy.catalog.residents.entries) == 1)
        async with asyncio.timeout(PATIENCE_S), daemon.request("DELETE", NS) as answer:
            assert (answer.status, await answer.json()) == (200, {"removed": 1, "set_aside": False})
        assert held(daemon) == 0
        assert daemon.toy.service.leases._of == {}


async def test_a_block_that_is_pinned_again_and_again_counts_once():
    async with running(host=16 * BLOCK_BYTES, disk=0) as daemon:
        await daemon.register()
        await store(daemon, *range(1, 7))
        first = [(await post(daemon, "pin", {"keys": [key(1).hex()], "seconds": 60})) for _ in range(9)]
        assert {status for status, _ in first} == {201}
        for _, lease in first[1:]:
            assert await give_back(daemon, lease["id"]) == 204
        assert (await post(daemon, "pin", {"keys": [key(n).hex() for n in range(1, 5)], "seconds": 60}))[
            0
        ] == 201
        assert await give_back(daemon, first[0][1]["id"]) == 204
        assert (await post(daemon, "pin", {"keys": [key(5).hex()], "seconds": 60}))[0] == 503, (
            "the first stays"
        )


async def test_the_deletion_of_a_leased_block_goes_on_past_its_deadline_and_says_so():
    async with running() as daemon:
        await daemon.register()
        await store(daemon, 1)
        _, lease = await post(daemon, "pin", {"keys": [key(1).hex()], "seconds": 60})
        path = f"{NS}/blocks/{key(1).hex()}"
        for _ in range(2):
            async with daemon.request("DELETE", path, headers={"Kvtcd-Deadline-Ms": "50"}) as answer:
                problem = await answer.json()
            assert (answer.status, problem["goes_on"]) == (504, True)
            assert "it goes on" in problem["detail"]
        assert await there(daemon, 1) == "0", "it is served no more"
        url = f"{path}?tokens={BLOCK_TOKENS}"
        octets = {"Content-Type": "application/octet-stream"}
        async with daemon.request("PUT", url, data=block(1), headers=octets) as answer:
            assert await answer.json() == {"key": key(1).hex(), "outcome": "dropped", "reason": "going"}

        last = asyncio.create_task(give_back(daemon, lease["id"]))
        async with daemon.request("DELETE", path) as answer:
            assert answer.status == 204, "who waits is told of the end"
        assert await last == 204
        async with daemon.request("DELETE", path) as answer:
            assert answer.status == 404
        async with daemon.request("PUT", url, data=block(1), headers=octets) as answer:
            assert (await answer.json())["outcome"] == "stored"
