"""The daemon in numbers: over time, and by tenant, against traffic that the test knows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from support.http import until
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import DiskTier, Policy
from kvtcd.engine import overview
from kvtcd.engine.history import History, Sample
from kvtcd.engine.tally import Counts

EVICT = Policy("t", disk=DiskTier("evict"))


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number] * 32))


async def store(service, ns, *numbers: int, salt: bytes = b"") -> None:
    async with service.blocks.batch(ns, salt, soon(), durable=False) as batch:
        for number in numbers:
            slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, 0), BLOCK_BYTES)
            slot.write(memoryview(block(number)))
        await batch.commit()


async def read(service, ns, number: int) -> bool:
    try:
        async with service.blocks.read(ns, key(number), b"", soon()):
            return True
    except NotFound:
        return False


def test_a_history_forgets_the_oldest_and_sums_both_forms():
    history, counts = History(size=3), Counts()
    counts.misses, counts.fetched = 5, 3
    for place, n in ((Place.HOST, 1), (Place.PACKED, 10), (Place.DISK, 100)):
        counts.places[place].blocks, counts.places[place].bytes, counts.places[place].hits = n, 2 * n, 3 * n
    for second in range(5):
        history.add(Sample.of(float(second), counts, [Tier.HOST, Tier.DISK]))
    body = history.samples.to_json()
    assert [sample["uptime_s"] for sample in body["samples"]] == [2.0, 3.0, 4.0]
    assert body["samples"][0] == {
        "uptime_s": 2.0,
        "misses": 5,
        "fetched": 3,
        "tiers": {
            "host": {"blocks": 11, "bytes": 22, "hits": 33},
            "disk": {"blocks": 100, "bytes": 200, "hits": 300},
        },
    }


@pytest.mark.asyncio
async def test_samples_are_taken_while_the_daemon_runs_and_show_what_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "EVERY_S", 0.01)
    async with toy_service(tmp_path, policy=EVICT) as toy:
        service = toy.service
        ns = await service.register("a", "n", IDENTITY)
        await store(service, ns, 1, 2)
        assert await read(service, ns, 1)
        assert not await read(service, ns, 9)

        def last() -> dict:
            return service.overview.history.samples.to_json()["samples"][-1]

        await until(lambda: last()["misses"])
        sample = last()
        assert sample["tiers"]["host"] == {"blocks": 2, "bytes": 2 * BLOCK_BYTES, "hits": 1}
        assert sample["tiers"]["disk"] == {"blocks": 0, "bytes": 0, "hits": 0}
        times = [each["uptime_s"] for each in service.overview.history.samples.to_json()["samples"]]
        assert times == sorted(times)


@pytest.mark.asyncio
async def test_each_tenant_is_summed_over_his_own_namespaces(tmp_path):
    async with toy_service(tmp_path, policy=EVICT) as toy:
        service = toy.service
        first = await service.register("a", "one", IDENTITY)
        second = await service.register("a", "two", replace(IDENTITY, model="b"))
        third = await service.register("b", "one", IDENTITY)
        await store(service, first, 1)
        await store(service, second, 1, 2)
        await store(service, third, 3)
        assert await read(service, first, 1)
        assert await read(service, second, 1)
        assert not await read(service, third, 1)
        rows = {row["tenant"]: row for row in (each.to_json() for each in service.overview.tenants())}
    raw = {name: row["tiers"]["host"]["raw"] for name, row in rows.items()}
    assert {name: (row["namespaces"], row["misses"]) for name, row in rows.items()} == {
        "a": (["one", "two"], 0),
        "b": (["one"], 1),
    }
    assert (raw["a"]["blocks"], raw["a"]["bytes"], raw["a"]["hits"]) == (3, 3 * BLOCK_BYTES, 2)
    assert (raw["b"]["blocks"], raw["b"]["bytes"], raw["b"]["hits"]) == (1, BLOCK_BYTES, 0)


@pytest.mark.asyncio
async def test_moves_that_run_are_counted(tmp_path):
    async with toy_service(tmp_path, policy=EVICT) as toy:
        service = toy.service
        ns = await service.register("a", "n", IDENTITY)
        await store(service, ns, 1, 2)
        toy.codecs[0].gate.clear()
        going = asyncio.create_task(service.blocks.demote(ns, [key(1)], b"", soon()))
        await until(lambda: service.overview.stats("a").moving)
        during = service.overview.stats("a").to_json()
        toy.codecs[0].gate.set()
        await going
        after = service.overview.stats("a").to_json()
    assert (during["moving"], during["demoting"], during["waiting"]) == (1, 1, 1)
    assert (after["moving"], after["demoting"], after["waiting"]) == (0, 0, 0)


@pytest.mark.asyncio
async def test_matches_that_find_something_are_counted_by_their_first_block(tmp_path):
    async with toy_service(tmp_path, policy=EVICT) as toy:
        service, matched = toy.service, toy.service.prefixes
        ns = await service.register("a", "n", IDENTITY)
        other = await service.register("a", "m", replace(IDENTITY, model="b"))
        await store(service, ns, 1, 2, 3)
        await store(service, ns, 1, salt=b"s")
        for keys in ([1], [1, 2, 3], [1, 9], [2], [9, 1]):
            matched.match(ns, [key(n) for n in keys], b"")
        matched.match(ns, [key(1)], b"s")
        found = [(p.key, p.salt, p.matches, p.blocks) for p in matched.most_matched(ns, 9)]
        assert found == [(key(1), b"", 3, 3), (key(2), b"", 1, 1), (key(1), b"s", 1, 1)]
        assert matched.most_matched(ns, 1)[0].matches == 3
        assert matched.most_matched(other, 9) == []
        await service.purge("a", "n")
        assert matched.most_matched(ns, 9) == []


@pytest.mark.asyncio
async def test_a_loop_that_does_something_else_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "EVERY_S", 0.01)
    async with toy_service(tmp_path) as toy:

        def seconds() -> float:
            (lag,) = toy.service.metrics.loop_lag.collect()
            return next(sample.value for sample in lag.samples if sample.name.endswith("_sum"))

        before = seconds()
        time.sleep(0.5)  # noqa: ASYNC251 - this is what must not happen
        await until(lambda: seconds() > before + 0.4)
