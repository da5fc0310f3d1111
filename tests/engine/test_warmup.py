"""What was raw in memory before a clean stop is so again soon after the next start; nothing waits for it."""

from __future__ import annotations

import asyncio

import pytest
from support.http import until
from support.invariants import check
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import Busy, StoreFailed
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import DiskTier, Policy
from kvtcd.engine.warmup import keys_of
from kvtcd.tiers.disk import Environment

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


async def store(service, ns, *numbers: int) -> None:
    async with service.blocks.batch(ns, b"", soon(), durable=True) as batch:
        for number in numbers:
            slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, 0), BLOCK_BYTES)
            slot.write(memoryview(block(number)))
        await batch.commit()


async def warmed(toy) -> list[EngineKey]:
    """Return the engine keys of what is raw on the host once nothing more comes up."""
    await asyncio.wait_for(toy.service._warming, PATIENCE_S)
    entries, origins = toy.catalog.residents.entries, toy.service._driver.origins
    return sorted(origins[k].engine_key for k, entry in entries.items() if entry.ready(Place.HOST))


async def test_what_was_hot_comes_up_again_and_what_was_not_stays_below(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, 1, 2, 3, 4)
        await toy.service.blocks.demote(ns, [key(2), key(4)], b"", soon())
    async with toy_service(tmp_path) as toy:
        again = await warmed(toy)
        text = toy.service.metrics_text().decode()

    assert again == [key(1), key(3)]
    assert "kvtcd_warmed_blocks_total 2.0" in text


async def test_warming_up_ends_at_the_low_mark_with_what_was_used_last(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for number in range(1, 7):
            toy.catalog._clock = lambda number=number: 1000.0 + number
            await store(toy.service, ns, number)
    async with toy_service(tmp_path, host=4 * BLOCK_BYTES) as toy:
        again = await warmed(toy)

    assert again == [key(4), key(5), key(6)], "85 % of four"


async def test_a_purged_namespace_is_not_warmed_and_no_one_is_called_warm(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, 1)
    async with toy_service(tmp_path) as toy:
        await warmed(toy)
        assert [n.name for n in toy.service.namespaces(TENANT)] == ["n"]
        await toy.service.purge(TENANT, "n")
    async with toy_service(tmp_path) as toy:
        assert await warmed(toy) == []


async def test_a_stop_in_the_middle_of_it_is_clean(tmp_path) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, *range(1, 20))
    async with toy_service(tmp_path):
        pass  # closed while blocks come up
    async with toy_service(tmp_path) as toy:
        assert len(toy.service.namespaces(TENANT)) == 1
        assert set(await warmed(toy)) <= {key(n) for n in range(1, 20)}


async def test_half_a_key_is_no_key() -> None:
    assert keys_of(b"a" * 70) == [b"a" * 32, b"a" * 32]


async def test_a_warm_up_that_fails_is_counted_and_the_rest_goes_on(tmp_path, monkeypatch) -> None:
    async def broken(*_args) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("kvtcd.engine.service.warm_up", broken)
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, 1)
        text = toy.service.metrics_text().decode()

    assert 'kvtcd_internal_errors_total{where="warm-up"} 1.0' in text


async def test_moves_of_a_warm_up_that_fail_hold_no_room_and_a_reader_is_told_that_his_failed(
    tmp_path, monkeypatch
) -> None:
    async with toy_service(tmp_path) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, 1, 2, 3)

    def unreadable(*_args: object) -> None:
        raise StoreFailed("read", "EIO")

    async def get(number: int) -> bytes:
        async with toy.service.blocks.read(ns, key(number), b"", soon()) as lease:
            return b"".join(map(bytes, lease.pieces()))

    with monkeypatch.context() as broken:
        broken.setattr(Environment, "read", unreadable)
        async with toy_service(tmp_path, host=4 * BLOCK_BYTES) as toy:
            ns = toy.service.namespace(TENANT, "n")
            assert await warmed(toy) == []
            check(toy.catalog)
            assert toy.catalog.residents.shelves[Tier.HOST].whole.used == 0
            with pytest.raises(Busy, match="the way up from disk failed"):
                await get(1)
            broken.undo()
            assert [await get(number) for number in (1, 2, 3)] == [block(1), block(2), block(3)]


async def test_a_tick_that_fails_is_counted_and_the_next_one_comes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvtcd.engine.service.TICK", 0.001)
    policy = Policy("brief", disk=DiskTier(ttl=60))
    async with toy_service(tmp_path, policy=policy) as toy:
        monkeypatch.setattr(toy.catalog, "_sweep", lambda: 1 / 0)
        await until(lambda: 'where="tick"} 3' in toy.service.metrics_text().decode())
        monkeypatch.undo()
        assert not toy.service._ticking.done()
