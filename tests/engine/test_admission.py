"""What a policy admits and how long it keeps it, through the service and over restarts."""

from __future__ import annotations

import time

import pytest
from support.http import until
from support.stored import key, store
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, soon, toy_service

from kvtcd.core.messages import BlockHead
from kvtcd.core.policy import Admit, DiskTier, Evict, Policy

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"


def chain(count: int, last: int = BLOCK_TOKENS, *, first: int = 0, start: int = 0) -> list[BlockHead]:
    """Return heads of a sequence of blocks that follow each other in the batch."""
    return [
        BlockHead(
            key(start + i), last if i == count - 1 else BLOCK_TOKENS, first_token=first + i * BLOCK_TOKENS
        )
        for i in range(count)
    ]


async def test_a_block_is_stored_when_it_is_offered_for_the_second_time(tmp_path) -> None:
    policy = Policy("second", admit=Admit(on_sight=2))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        outcomes = [await store(toy.service, ns, *chain(2)) for _ in range(3)]
        toy.service.prefixes.match(ns, [key(7)], b"")
        unseen = await store(toy.service, ns, BlockHead(key(7), BLOCK_TOKENS, first_token=0))

    assert outcomes == [["not-admitted"] * 2, ["stored"] * 2, ["duplicate"] * 2]
    assert unseen == ["not-admitted"], "a match is no sight"


async def test_a_sequence_is_stored_when_it_is_long_enough(tmp_path) -> None:
    policy = Policy("long", admit=Admit(min_tokens=3 * BLOCK_TOKENS))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        short = await store(toy.service, ns, *chain(3, last=BLOCK_TOKENS - 1))
        left = toy.service.overview.stats(TENANT).blocks
        long = await store(toy.service, ns, *chain(3, start=10))
        # The end of a sequence whose beginning is here already.
        rest = await store(toy.service, ns, *chain(1, last=1, first=3 * BLOCK_TOKENS, start=13))

    assert (short, left) == (["not-admitted"] * 3, 0)
    assert long == ["stored"] * 3
    assert rest == ["stored"]


async def test_each_sequence_of_a_batch_has_its_own_length(tmp_path) -> None:
    policy = Policy("long", admit=Admit(min_tokens=3 * BLOCK_TOKENS))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        both = await store(toy.service, ns, *chain(2), *chain(3, start=10))

    assert both == ["not-admitted"] * 2 + ["stored"] * 3


async def test_without_positions_the_order_of_a_batch_gives_the_length(tmp_path) -> None:
    policy = Policy("long", admit=Admit(min_tokens=3 * BLOCK_TOKENS))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        two = await store(toy.service, ns, *(BlockHead(key(i), BLOCK_TOKENS) for i in range(2)))
        three = await store(toy.service, ns, *(BlockHead(key(i), BLOCK_TOKENS) for i in range(3)))

    assert (two, three) == (["not-admitted"] * 2, ["stored"] * 3)


async def test_a_full_tier_refuses_what_is_worth_no_more_than_it_holds(tmp_path) -> None:
    async with toy_service(tmp_path, host=2 * BLOCK_BYTES, disk=0) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        first = await store(toy.service, ns, *chain(2), durable=False)
        once = await store(toy.service, ns, *chain(1, start=5), durable=False)
        twice = await store(toy.service, ns, *chain(1, start=5), durable=False)

    assert (first, once, twice) == (["stored"] * 2, ["not-admitted"], ["stored"])


async def test_a_tier_below_that_has_room_makes_all_welcome(tmp_path) -> None:
    async with toy_service(tmp_path, host=2 * BLOCK_BYTES) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        outcomes = [await store(toy.service, ns, *chain(1, start=i)) for i in range(8)]

    assert outcomes == [["stored"]] * 8


async def test_the_end_of_a_prefix_makes_room_before_its_beginning(tmp_path) -> None:
    policy = Policy("lru", evict=Evict("lru"))
    async with toy_service(tmp_path, host=4 * BLOCK_BYTES, disk=0, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, *chain(4), durable=False)
        async with toy.service.blocks.read(ns, key(3), b"", soon()):
            pass  # the end is the youngest now
        await store(toy.service, ns, *chain(1, start=9), durable=False)
        there = [
            match.tier is not None
            for match in toy.service.prefixes.match(ns, [key(i) for i in range(4)], b"").blocks
        ]

    assert there == [True, True, True, False]


async def test_a_block_is_forgotten_when_its_time_is_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvtcd.engine.service.TICK", 0.05)
    policy = Policy("brief", disk=DiskTier(ttl=1))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, *chain(2))
        before = [match.tier for match in toy.service.prefixes.match(ns, [key(0)], b"").blocks]
        await until(lambda: not toy.service.overview.stats(TENANT).blocks)
        used = {tier: sums.used for tier, sums in toy.service.overview.stats(TENANT).tiers.items()}
        expired = toy.service.metrics.lost.labels("expired")._value.get()

    assert before != [None]
    assert used == {"host": 0, "disk": 0}, "without anybody asking for it"
    assert expired == 2


async def test_the_time_of_a_block_goes_on_while_the_daemon_does_not_run(tmp_path, monkeypatch) -> None:
    policy = Policy("week", disk=DiskTier(ttl=1000))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, *chain(1))
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 400 * 10**9)
    async with toy_service(tmp_path) as toy:  # what was promised holds, whatever the policy says now
        ns = toy.service.namespace(TENANT, "n")
        (entry,) = toy.catalog.residents.entries.values()
        left = entry.expires - toy.catalog.residents.now
        await toy.service.blocks.demote(ns, [key(0)], b"", soon())
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 1001 * 10**9)
    async with toy_service(tmp_path) as toy:
        blocks = toy.service.overview.stats(TENANT).blocks
        lost = toy.service.metrics.lost.labels("expired")._value.get()
    monkeypatch.undo()
    async with toy_service(tmp_path) as toy:
        gone = toy.service.overview.stats(TENANT).blocks

    assert 590 <= left <= 600
    assert (blocks, lost, gone) == (0, 1, 0)


async def test_a_block_that_came_up_from_disk_keeps_its_time(tmp_path) -> None:
    policy = Policy("week", disk=DiskTier(ttl=1000))
    async with toy_service(tmp_path, policy=policy) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, *chain(1))
        (origin,) = toy.service._driver.origins.values()
        await toy.service.blocks.demote(ns, [key(0)], b"", soon())
        async with toy.service.blocks.read(ns, key(0), b"", soon()):
            (again,) = toy.service._driver.origins.values()

    assert origin.expires == origin.created + 1_000_000
    assert again.expires == origin.expires
