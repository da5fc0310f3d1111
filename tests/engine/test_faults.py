"""The engine over a disk whose n-th call fails or that stands still, and under a clock that jumps."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import threading
import time
from typing import get_args

import pytest
from support.invariants import check
from support.patience import PATIENCE_S
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block, soon, toy_service

from kvtcd.core.errors import KvtcdError, NotFound, StoreFailed, StoreFull
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, Evict, EvictName, HostTier, Policy

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"
NUMBERS = range(3)


def key(number: int) -> EngineKey:
    return EngineKey(number.to_bytes(32, "big"))


async def store(service, ns, number: int, *, durable: bool) -> str:
    async with service.blocks.batch(ns, b"", soon(), durable=durable) as batch:
        slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, first_token=0), BLOCK_BYTES)
        if slot is not None:
            slot.write(memoryview(block(number)))
        (result,) = await batch.commit()
    return result.reason or result.outcome


async def fetch(service, ns, number: int) -> bytes:
    async with service.blocks.read(ns, key(number), b"", soon()) as lease:
        return b"".join(bytes(piece) for piece in lease.pieces())


def disk_of(toy):
    return toy.service._registry.tenants[TENANT].writer.environment


# One failing call -------------------------------------------------------------------------------------------


async def with_one_failure(path, at: int, error: type[StoreFailed]) -> bool:
    """Store, move down, read and delete, while one call to the disk fails; tell whether it came to that."""
    calls, failed, durable = itertools.count(), [], set()

    def failing(op: str, call):
        def wrapped(*arguments):
            if next(calls) == at:
                failed.append(op)
                raise error(op, "EIO" if error is StoreFailed else "ENOSPC")
            return call(*arguments)

        return wrapped

    async with toy_service(path, policy=Policy("toy", disk=DiskTier("evict"))) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        disk = disk_of(toy)
        for op in ("write", "read"):
            setattr(disk, op, failing(op, getattr(disk, op)))
        for number in NUMBERS:
            if await store(service, ns, number, durable=True) == "stored":
                durable.add(number)
        for number in NUMBERS:
            await service.blocks.demote(ns, [key(number)], b"", soon())
        for number in NUMBERS:
            try:
                assert await fetch(service, ns, number) == block(number)
            except KvtcdError:
                assert failed, "only the fault denies a block"
        await service.blocks.delete(ns, [key(0)], b"")
        with pytest.raises(NotFound):
            await fetch(service, ns, 0)
        for number in NUMBERS[1:]:
            assert await store(service, ns, number, durable=True) in {"stored", "duplicate"}
            assert await fetch(service, ns, number) == block(number), "one failure costs one step"
        await service._driver.idle()
        check(toy.catalog)
        assert service._driver.waiting == 0
    async with toy_service(path) as toy:
        ns = toy.service.namespace(TENANT, "n")
        for number in NUMBERS[1:]:
            assert await fetch(toy.service, ns, number) == block(number), "what was durable is there"
        with pytest.raises(NotFound):
            await fetch(toy.service, ns, 0)
    return bool(failed)


@pytest.mark.parametrize("error", [StoreFailed, StoreFull], ids=["EIO", "ENOSPC"])
async def test_whichever_call_to_the_disk_fails_no_byte_is_wrong_and_nobody_waits(
    tmp_path, caplog, error
) -> None:
    points = 0
    while await with_one_failure(tmp_path / str(points), points, error):
        points += 1
    assert points == 7, "three writes, three reads, the delete"
    code = "EIO" if error is StoreFailed else "ENOSPC"
    told = [line for line in caplog.messages if code in line]
    assert len(told) == points, "each failure is in the log, once"
    assert (
        sum("of namespace n, tenant uid:1: the move from disk to host failed" in line for line in told) == 3
    )


# Random faults ----------------------------------------------------------------------------------------------


async def history(path, seed: int) -> int:
    """Let clients do what they like while disk and codec fail and dawdle at random; return the hits."""
    rng, faulty = random.Random(seed), [True]
    policy = Policy(
        "small",
        host=HostTier(rng.choice(["raw", "raw-then-packed"]), raw=0.3, high=0.6, low=0.4),
        disk=DiskTier(rng.choice(["behind", "evict"]), high=0.9, low=0.7),
        evict=Evict(rng.choice(get_args(EvictName))),
        packer_behind=rng.choice(["drop", "lossless"]),
    )

    def unreliable(op: str, call):
        def wrapped(*arguments, **keywords):
            if faulty[0]:
                time.sleep(rng.choice([0, 0, 0, 0.001, 0.003]))
                if rng.random() < 0.1:
                    raise rng.choice([StoreFailed, StoreFull])(op, "injected")
            return call(*arguments, **keywords)

        return wrapped

    async with toy_service(path, host=8 * BLOCK_BYTES, disk=30 * BLOCK_BYTES, policy=policy) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        disk, (codec,), hits = disk_of(toy), toy.codecs, 0
        disk.write, disk.read = unreliable("write", disk.write), unreliable("read", disk.read)
        codec.encode = unreliable("encode", codec.encode)

        async def client(own: random.Random) -> None:
            nonlocal hits
            for _ in range(25):
                number, choice = own.randrange(20), own.random()
                try:
                    if choice < 0.4:
                        await store(service, ns, number, durable=own.random() < 0.3)
                    elif choice < 0.85:
                        assert await fetch(service, ns, number) == block(number)
                        hits += 1
                    elif choice < 0.9:
                        await service.blocks.demote(ns, [key(number)], b"", soon())
                    elif choice < 0.95:
                        await service.blocks.prefetch(ns, [key(number)], b"", soon())
                    else:
                        await service.blocks.delete(ns, [key(number)], b"")
                except KvtcdError:
                    pass  # a miss, no room, or the fault itself

        await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(8)))
        faulty[0] = False
        await service._driver.idle()
        check(toy.catalog)
        assert service._driver.waiting == 0, "nobody is left waiting"
        assert await store(service, ns, 99, durable=True) == "stored", "and it goes on"
    # What was on disk at the end is there again, beside what could not be removed; closing evicts some.
    record_of = service._registry.record_keys(ns, b"")
    kept = {n for n in (*range(20), 99) if Tier.DISK in toy.catalog.tiers(record_of(key(n)))}
    left = {n for n in (*range(20), 99) if record_of(key(n)) in service._driver.undropped}
    async with toy_service(path) as toy:
        ns = toy.service.namespace(TENANT, "n")
        found = [n for n in (*range(20), 99) if toy.service.prefixes.match(ns, [key(n)], b"").prefix]
        assert set(found) <= kept | left
        assert kept <= set(found) or left, "with what is left there may be too much"
        assert [await fetch(toy.service, ns, n) for n in found] == [block(n) for n in found]
    return hits


@pytest.mark.parametrize("seed", range(4))
async def test_while_disk_and_codec_fail_at_random_bytes_are_right_and_nobody_waits(tmp_path, seed) -> None:
    assert await history(tmp_path, seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 25))
async def test_many_histories_of_failing_and_slow_disks_and_codecs(tmp_path, first) -> None:
    hits = 0
    for seed in range(first, first + 25):
        hits += await history(tmp_path / str(seed), seed)
        await asyncio.to_thread(shutil.rmtree, tmp_path / str(seed))
    assert hits > 250


# A slow disk ------------------------------------------------------------------------------------------------


async def test_while_the_disk_stands_still_memory_is_served_and_new_blocks_are_taken(tmp_path) -> None:
    async with toy_service(tmp_path, policy=Policy("toy", disk=DiskTier("evict"))) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        await store(service, ns, 0, durable=True)
        await service.blocks.demote(ns, [key(0)], b"", soon())
        disk, turning, entered = disk_of(toy), threading.Event(), threading.Semaphore(0)
        write, read = disk.write, disk.read

        def slowly(call):
            def wrapped(*arguments):
                entered.release()
                turning.wait(PATIENCE_S)
                return call(*arguments)

            return wrapped

        disk.write, disk.read = slowly(write), slowly(read)
        try:
            durable = asyncio.create_task(store(service, ns, 1, durable=True))
            cold = asyncio.create_task(fetch(service, ns, 0))
            for _ in range(2):
                assert await asyncio.to_thread(entered.acquire, timeout=PATIENCE_S), "both are at the disk"
            stored = [await store(service, ns, number, durable=False) for number in range(2, 12)]
            read_back = [await fetch(service, ns, number) for number in range(1, 12)]
            found = service.prefixes.match(ns, [key(number) for number in range(12)], b"").blocks
            still = (durable.done(), cold.done())
        finally:
            turning.set()
        assert await durable == "stored"
        assert await cold == block(0)
        check(toy.catalog)

    assert still == (False, False)
    assert stored == ["stored"] * 10
    assert read_back == [block(number) for number in range(1, 12)]
    assert [one.tier for one in found] == [Tier.DISK, *[Tier.HOST] * 11]


# A clock that jumps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-10 * 365 * 86400, -86400, -1, 1, 3600])
async def test_a_wall_clock_that_jumps_costs_no_block_and_gives_none_more_time(
    tmp_path, monkeypatch, seconds
) -> None:
    ttl, clock = 7200, time.time_ns
    async with toy_service(tmp_path, policy=Policy("brief", disk=DiskTier(ttl=ttl))) as toy:
        service, ns = toy.service, await toy.service.register(TENANT, "n", IDENTITY)
        assert await store(service, ns, 1, durable=True) == "stored"
        monkeypatch.setattr(time, "time_ns", lambda: clock() + seconds * 10**9)
        assert await store(service, ns, 2, durable=True) == "stored"
        assert [await fetch(service, ns, number) for number in (1, 2)] == [block(1), block(2)]
    async with toy_service(tmp_path) as toy:
        service, ns = toy.service, toy.service.namespace(TENANT, "n")
        now = toy.catalog.current().now
        left = [entry.expires - now for entry in toy.catalog.residents.entries.values()]
        assert [await fetch(service, ns, number) for number in (1, 2)] == [block(1), block(2)]
        await service.purge(TENANT, "n")
        ns = await service.register(TENANT, "n", IDENTITY)
        with pytest.raises(NotFound):
            await fetch(service, ns, 1)
        check(toy.catalog)

    assert len(left) == 2
    assert all(0 < one <= ttl for one in left)
