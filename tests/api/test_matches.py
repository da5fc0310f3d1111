"""What a match says besides the blocks asked for: other ranks, partial blocks that go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.http import NS, TENANT_HEADER, Daemon, running, until
from support.toy import BLOCK_TOKENS, IDENTITY, block, soon

from kvtcd.core.keys import EngineKey, chain, token_array, tokens_to_bytes
from kvtcd.core.messages import BlockHead

pytestmark = pytest.mark.asyncio
OCTETS = {"Content-Type": "application/octet-stream"}


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


async def store(daemon: Daemon, name: str, *heads: BlockHead, data: bytes | None = None) -> None:
    """Store a sequence of blocks in one batch, durably."""
    service = daemon.toy.service
    async with service.blocks.batch(service.namespace("uid:1", name), b"", soon(), durable=True) as batch:
        for head in heads:
            raw = data or block(head.key[0], head.tokens)
            slot = await batch.reserve(head, len(raw))
            if slot is not None:
                slot.write(memoryview(raw))
        await batch.commit()


async def match(daemon: Daemon, name: str, keys, query: str = "") -> dict:
    body = {"keys": [key.hex() for key in keys]}
    async with daemon.request("POST", f"/v1/namespaces/{name}/match{query}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def register(daemon: Daemon, name: str, **fields: object) -> None:
    identity = replace(IDENTITY, **fields).to_json()
    async with daemon.request("PUT", f"/v1/namespaces/{name}", json=identity) as answer:
        assert answer.status == 200, await answer.text()


async def test_all_ranks_have_what_the_slowest_of_them_has():
    async with running() as daemon:
        await register(daemon, "r0", parallel="tp2-rank0")
        await store(daemon, "r0", *(BlockHead(key(n), BLOCK_TOKENS) for n in (1, 2, 3)))
        alone = await match(daemon, "r0", [key(1), key(2)], "?ranks=all")
        assert (alone["prefix_blocks"], alone["tiers"]) == (0, [None, None]), "there is no rank 1 yet"

        await register(daemon, "r1", parallel="tp2-rank1")
        await register(daemon, "stranger", parallel="tp2-rank1", weights="cd" * 32)
        await register(daemon, "wider", parallel="tp4-rank1")
        await store(daemon, "r1", *(BlockHead(key(n), BLOCK_TOKENS) for n in (1, 2, 4)))
        await store(daemon, "stranger", BlockHead(key(3), BLOCK_TOKENS))
        ns = daemon.toy.service.namespace("uid:1", "r1")
        await daemon.toy.service.blocks.demote(ns, [key(2)], b"", soon())

        wanted = [key(n) for n in (1, 2, 3, 4)]
        for name in ("r0", "r1"):
            found = await match(daemon, name, wanted, "?ranks=all")
            assert found["tiers"] == ["host", "disk", None, None]
            assert found["prefix_blocks"] == 2
            assert found["prefix_tokens"] == 2 * BLOCK_TOKENS
        assert (await match(daemon, "r0", wanted, "?ranks=one"))["bitmap"] == "1110"
        assert (await match(daemon, "r0", wanted))["tiers"] == ["host", "host", "host", None]
        async with daemon.request("PUT", NS, json=IDENTITY.to_json(), headers={TENANT_HEADER: "uid:2"}):
            pass


async def test_all_ranks_match_tokens_each_under_its_own_chain():
    tokens = list(range(3 * BLOCK_TOKENS + 5))
    async with running() as daemon:
        for rank, count in ((0, 4), (1, 3), (2, 3)):
            identity = replace(IDENTITY, parallel=f"tp3-rank{rank}")
            await register(daemon, f"r{rank}", parallel=identity.parallel)
            links = list(chain(identity.digest, tokens, BLOCK_TOKENS))[:count]
            await store(
                daemon, f"r{rank}", *(BlockHead(ln.key, ln.tokens, ln.first, ln.parent) for ln in links)
            )
        body = tokens_to_bytes(token_array(tokens))
        path = "/v1/namespaces/r1/match"
        async with daemon.request("POST", f"{path}?ranks=all", data=body, headers=OCTETS) as answer:
            found = await answer.json()
        root = replace(IDENTITY, parallel="tp3-rank1").digest
        own = [link.key.hex() for link in chain(root, tokens, BLOCK_TOKENS)][:3]
        assert found["keys"] == own, "named as the asked rank names them"
        async with daemon.request("POST", "/v1/namespaces/r0/match", data=body, headers=OCTETS) as answer:
            assert (await answer.json())["prefix_tokens"] == len(tokens)


@pytest.mark.parametrize("parallel", ["tp2-rank2", "tp0-rank0", "tp2", "tp2-rank01", "tp2-rank0-tp2-rank1"])
async def test_a_rank_that_cannot_be_understood_is_said(parallel):
    async with running() as daemon:
        await register(daemon, "odd", parallel=parallel)
        body = {"keys": [key(1).hex()]}
        async with daemon.request("POST", "/v1/namespaces/odd/match?ranks=all", json=body) as answer:
            assert (answer.status, (await answer.json())["field"]) == (400, "ranks")
        for query in ("ranks=some", "rank=all", "ranks=all&ranks=all"):
            async with daemon.request("POST", f"/v1/namespaces/odd/match?{query}", json=body) as answer:
                assert answer.status == 400


async def test_the_stages_of_a_pipeline_are_ranks_too_and_may_have_different_layers():
    stages = {(stage, rank): f"pp2-rank{stage}-tp2-rank{rank}" for stage in (0, 1) for rank in (0, 1)}
    async with running() as daemon:
        for (stage, rank), parallel in stages.items():
            layout = replace(IDENTITY.layout, layers=IDENTITY.layout.layers + stage)
            await register(daemon, f"s{stage}r{rank}", parallel=parallel, layout=layout)
        for name, numbers in (("s0r0", (1, 2, 3)), ("s0r1", (1, 2, 3)), ("s1r0", (1, 2)), ("s1r1", (1, 3))):
            space = daemon.toy.service.namespace("uid:1", name)
            nbytes = BLOCK_TOKENS * space.identity.layout.token_bytes
            heads = [BlockHead(key(n), BLOCK_TOKENS) for n in numbers]
            await store(daemon, name, *heads, data=bytes(nbytes))
        for name in ("s0r0", "s1r1"):
            assert (await match(daemon, name, [key(n) for n in (1, 2, 3)], "?ranks=all"))["bitmap"] == "100"

        layout = replace(IDENTITY.layout, layers=IDENTITY.layout.layers + 2)
        await register(daemon, "dealt-anew", parallel=stages[1, 0], layout=layout)
        body = {"keys": [key(1).hex()]}
        async with daemon.request("POST", "/v1/namespaces/s0r0/match?ranks=all", json=body) as answer:
            assert answer.status == 400
            assert "s1r0 and dealt-anew are both pp2-rank1-tp2-rank0" in (await answer.json())["detail"]


async def test_a_canonical_namespace_is_its_only_rank():
    async with running() as daemon:
        await daemon.register()
        await store(daemon, "demo", BlockHead(key(1), BLOCK_TOKENS))
        assert (await match(daemon, "demo", [key(1)], "?ranks=all"))["bitmap"] == "1"


async def test_the_lengths_of_partial_blocks_that_go_on_are_told_and_can_be_asked_for():
    async with running() as daemon:
        await daemon.register()
        await store(daemon, "demo", BlockHead(key(1), BLOCK_TOKENS, 0), BlockHead(key(2), BLOCK_TOKENS))
        for number, length in ((3, 5), (4, 9), (5, BLOCK_TOKENS)):
            head = BlockHead(key(number), length, 2 * BLOCK_TOKENS, parent=key(2))
            await store(daemon, "demo", head)
        await store(daemon, "demo", BlockHead(key(6), 7, BLOCK_TOKENS, parent=key(1)))
        await store(daemon, "demo", BlockHead(key(7), 3, 0))

        assert (await match(daemon, "demo", [key(1), key(2)]))["partials"] == [5, 9]
        assert (await match(daemon, "demo", [key(1), key(2), key(9)]))["partials"] == [5, 9]
        assert (await match(daemon, "demo", [key(1), key(9)]))["partials"] == [7]
        assert (await match(daemon, "demo", [key(9)]))["partials"] == [3], "of the first block"
        found = await match(daemon, "demo", [key(1), key(2), key(4)])
        assert (found["prefix_tokens"], found["partials"]) == (2 * BLOCK_TOKENS + 9, [])
        async with daemon.request("DELETE", f"{NS}/blocks/{key(3).hex()}") as answer:
            assert answer.status == 204
        assert (await match(daemon, "demo", [key(1), key(2)]))["partials"] == [9]


async def test_partial_blocks_count_for_all_ranks_where_every_rank_has_them():
    async with running() as daemon:
        for rank, lengths in ((0, (5, 9)), (1, (9, 11))):
            await register(daemon, f"r{rank}", parallel=f"tp2-rank{rank}")
            await store(daemon, f"r{rank}", BlockHead(key(1), BLOCK_TOKENS, 0))
            for length in lengths:
                await store(daemon, f"r{rank}", BlockHead(key(10 + length), length, BLOCK_TOKENS, key(1)))
        assert (await match(daemon, "r0", [key(1)], "?ranks=all"))["partials"] == [9]
        await store(daemon, "r0", BlockHead(key(2), BLOCK_TOKENS, BLOCK_TOKENS, key(1)))
        await store(daemon, "r0", BlockHead(key(3), 11, 2 * BLOCK_TOKENS, key(2)))
        found = await match(daemon, "r0", [key(1), key(2)], "?ranks=all")
        assert (found["prefix_blocks"], found["partials"]) == (1, [9]), "those that continue what all have"
        assert (await match(daemon, "r0", [key(1), key(2)]))["partials"] == [11]


async def test_a_rank_that_is_being_purged_is_missing():
    async with running() as daemon:
        for rank in range(2):
            await register(daemon, f"r{rank}", parallel=f"tp2-rank{rank}")
            await store(daemon, f"r{rank}", BlockHead(key(1), BLOCK_TOKENS, 0))
        registry = daemon.toy.service._registry
        number = daemon.toy.service.namespace("uid:1", "r1").number
        assert (await match(daemon, "r0", [key(1)], "?ranks=all&lease=9"))["lease"]
        registry.closing.add(number)
        assert (await match(daemon, "r0", [key(1)], "?ranks=all&lease=9"))["bitmap"] == "0"
        registry.closing.discard(number)


async def test_what_outlasts_its_deadline_is_said_to_and_a_purge_ends_all_the_same(monkeypatch):
    async with running() as daemon:
        await daemon.register()
        await store(daemon, "demo", BlockHead(key(1), BLOCK_TOKENS))
        tenancy, held = daemon.toy.service._tenancy, asyncio.Event()
        purge, register = tenancy.purge, tenancy.register

        async def slow(*args):
            await held.wait()
            return await purge(*args)

        async def never(*_args):
            await asyncio.Event().wait()

        monkeypatch.setattr(tenancy, "purge", slow)
        monkeypatch.setattr(tenancy, "register", never)
        brief = {"Kvtcd-Deadline-Ms": "50"}
        other = IDENTITY.to_json() | {"weights": "cd" * 32}
        for verb, path, body in (("DELETE", NS, None), ("PUT", "/v1/namespaces/x", other)):
            async with daemon.request(verb, path, json=body, headers=brief) as answer:
                assert (answer.status, (await answer.json())["type"]) == (
                    504,
                    "urn:kvtcd:error:deadline-exceeded",
                )
        monkeypatch.setattr(tenancy, "register", register)
        held.set()
        await until(lambda: not daemon.toy.service.namespaces("uid:1"))
        assert daemon.blocks() == 0
