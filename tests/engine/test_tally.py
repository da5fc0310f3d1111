"""Counts against a walk through all blocks, whatever happens to them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Place
from kvtcd.core.policy import DiskTier, Evict, HostTier, Policy

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


async def store(service, ns, *numbers: int, durable: bool = False, drop: bool = False) -> None:
    async with service.blocks.batch(ns, b"", soon(), durable=durable) as batch:
        for number in numbers:
            slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, 0), BLOCK_BYTES)
            if slot is not None and not drop:
                slot.write(memoryview(block(number)))
        await batch.commit()


async def read(service, ns, number: int) -> bool:
    try:
        async with service.blocks.read(ns, key(number), b"", soon()):
            return True
    except NotFound:
        return False


def walked(toy) -> dict[tuple[int, Place], tuple[int, int, int]]:
    """Blocks, bytes and raw bytes of each namespace and tier, counted one by one."""
    blocks, nbytes, raw = Counter(), Counter(), Counter()
    for entry in toy.catalog.residents.entries.values():
        for place, copy in entry.copies.items():
            if entry.ready(place):
                blocks[entry.namespace, place] += 1
                nbytes[entry.namespace, place] += copy.nbytes
                raw[entry.namespace, place] += BLOCK_BYTES
    return {place: (blocks[place], nbytes[place], raw[place]) for place in blocks}


def counted(toy, *namespaces) -> dict[tuple[int, Place], tuple[int, int, int]]:
    tally = toy.service._tally
    counts = {(ns.number, p): tally.of(ns.number).places[p] for ns in namespaces for p in Place}
    return {
        p: (c.blocks, c.bytes, c.raw_bytes) for p, c in counts.items() if c.blocks or c.bytes or c.raw_bytes
    }


@pytest.mark.parametrize("form", ["raw", "raw-then-packed"])
@pytest.mark.parametrize("write", ["behind", "evict"])
async def test_counts_agree_with_a_walk_after_whatever_happens(tmp_path, write, form):
    rng = random.Random(write)
    policy = Policy(
        "t", host=HostTier(form, high=1.0, low=0.8), disk=DiskTier(write, 1.0, 0.8), evict=Evict("lru")
    )
    async with toy_service(tmp_path, host=6 * BLOCK_BYTES, disk=96 << 10, policy=policy) as toy:
        service = toy.service
        spaces = [await service.register(TENANT, n, replace(IDENTITY, model=n)) for n in ("a", "b")]
        for step in range(150):
            ns, number = rng.choice(spaces), rng.randrange(40)
            match rng.randrange(6):
                case 0 | 1:
                    await store(service, ns, number, durable=step % 5 == 0)
                case 2:
                    await read(service, ns, number)
                case 3:
                    await service.blocks.delete(ns, [key(number)], b"")
                case 4:
                    await service.blocks.demote(ns, [key(number)], b"", soon())
                case 5:
                    await store(service, ns, number, drop=True)
            if step % 10 == 0:
                await service._driver.idle()
                assert counted(toy, *spaces) == walked(toy)
        for codec in toy.codecs:
            codec.fail = ZeroDivisionError("no")
        await service.blocks.demote(spaces[0], [key(n) for n in range(40)], b"", soon())
        assert counted(toy, *spaces) == walked(toy), "after moves that failed"
        for codec in toy.codecs:
            codec.fail = None
        assert toy.service._tally.total.places[Place.DISK].dropped["evicted"] > 0
        await service.purge(TENANT, "a")
        assert counted(toy, *spaces) == walked(toy)
        assert sum(c.blocks for c in service._tally.total.places) == sum(
            blocks for blocks, *_ in walked(toy).values()
        )
        kept = walked(toy)[spaces[1].number, Place.DISK]
    async with toy_service(tmp_path, host=6 * BLOCK_BYTES, disk=96 << 10, policy=policy) as toy:
        ns = toy.service.namespace(TENANT, "b")
        assert counted(toy, ns) == walked(toy), "what was found at the start"
        assert kept > (0, 0, 0) < counted(toy, ns)[ns.number, Place.DISK]


async def test_hits_misses_and_moves_are_counted_for_their_namespace_alone(tmp_path):
    policy = Policy("t", disk=DiskTier("evict"))
    async with toy_service(tmp_path, policy=policy) as toy:
        service = toy.service
        a = await service.register(TENANT, "a", IDENTITY)
        b = await service.register(TENANT, "b", replace(IDENTITY, model="b"))
        other = await service.register("uid:2", "a", IDENTITY)
        await store(service, a, 1, 2)
        await store(service, other, 1)
        assert await read(service, a, 1)
        await service.blocks.demote(a, [key(1)], b"", soon())
        assert await read(service, a, 1)
        assert not await read(service, b, 1)
        await service.blocks.delete(a, [key(1), key(2)], b"")

        own = service.overview.stats(TENANT).to_json()["own"]
        theirs = service.overview.stats("uid:2").to_json()["own"]
        tiers = service.overview.stats("uid:3").to_json()["tiers"]
        text = service.metrics_text().decode()

    zero = {
        "blocks": 0,
        "bytes": 0,
        "raw_bytes": 0,
        "hits": 0,
        "promotions": 0,
        "demotions": 0,
        "dropped": {},
    }
    assert own == {
        "a": {
            "misses": 0,
            "fetched": 0,
            "tiers": {
                "host": {
                    "raw": zero | {"hits": 1, "promotions": 1, "dropped": {"deleted": 2, "evicted": 1}},
                    "packed": zero,
                },
                "disk": {"packed": zero | {"hits": 1, "demotions": 1, "dropped": {"deleted": 1}}},
            },
        },
        "b": {
            "misses": 1,
            "fetched": 0,
            "tiers": {"host": {"raw": zero, "packed": zero}, "disk": {"packed": zero}},
        },
    }
    assert theirs["a"]["tiers"]["host"]["raw"] == zero | {
        "blocks": 1,
        "bytes": BLOCK_BYTES,
        "raw_bytes": BLOCK_BYTES,
    }
    raw, packed = tiers["host"]["raw"], tiers["disk"]["packed"]
    assert (raw["hits"], raw["blocks"], packed["hits"]) == (1, 1, 1)
    assert 'kvtcd_dropped_copies_total{place="host",reason="deleted"} 2.0' in text
    assert 'kvtcd_tier_blocks{tier="host"} 1.0' in text
    assert "uid:" not in text
