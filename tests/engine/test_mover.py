"""Moves of several blocks at once: their stages overlap, and each block keeps its own fate and bytes.

On threads, on a stand-in for CUDA, and on CUDA itself.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from support import fake_cuda
from support.invariants import check
from support.patience import PATIENCE_S
from support.pipelines import KINDS
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, LAYOUT, block, soon, toy_service

from kvtcd.core.errors import NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.core.policy import HostTier, Policy
from kvtcd.tiers.disk import Put

pytestmark = [pytest.mark.asyncio, pytest.mark.parametrize("kind", KINDS)]
TENANT, BLOCKS = "uid:1", 6
KEYS = [EngineKey(bytes([number]) * 32) for number in range(BLOCKS)]


@pytest.fixture(autouse=True)
def _device(kind, monkeypatch) -> None:
    if kind == "stand-in":
        fake_cuda.install(monkeypatch)


async def store(service, ns, *, key, data, durable=False) -> None:
    async with service.blocks.batch(ns, b"", soon(), durable=durable) as batch:
        tokens = len(data) // LAYOUT.token_bytes
        slot = await batch.reserve(BlockHead(key, tokens, first_token=0), len(data))
        slot.write(memoryview(data))
        await batch.commit()


async def fetch(service, ns, key) -> bytes:
    async with service.blocks.read(ns, key, b"", soon()) as lease:
        return b"".join(bytes(piece) for piece in lease.pieces())


class Meetings:
    """Block n in one stage meets block n + 1 in the stage before it, or a barrier breaks."""

    def __init__(self, count: int) -> None:
        self._barriers = [threading.Barrier(2, timeout=PATIENCE_S) for _ in range(count - 1)]
        self._ahead = iter(self._barriers)
        self._behind = iter(self._barriers)
        self._first = True

    def earlier_stage(self) -> None:
        """Called by the blocks in order."""
        if not self._first:
            next(self._ahead).wait()
        self._first = False

    def later_stage(self) -> None:
        """Called by the blocks in order."""
        if (barrier := next(self._behind, None)) is not None:
            barrier.wait()


async def test_a_block_is_read_while_the_one_before_it_is_unpacked(tmp_path, kind) -> None:
    async with toy_service(tmp_path, kind=kind) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for number, key in enumerate(KEYS):
            await store(toy.service, ns, key=key, data=block(number))
        await toy.service.blocks.demote(ns, KEYS, b"", soon())
        meetings, codec = Meetings(BLOCKS), toy.codecs[0]
        environment = toy.service._registry.tenants[TENANT].writer.environment
        read, inflate = environment.read, codec.inflate

        def reading(key, take):
            meetings.earlier_stage()
            return read(key, take)

        def inflating(blob, scratch):
            meetings.later_stage()
            return inflate(blob, scratch)

        environment.read, codec.inflate = reading, inflating
        bodies = await asyncio.gather(*(fetch(toy.service, ns, key) for key in KEYS))
        check(toy.catalog)

    assert bodies == [block(number) for number in range(BLOCKS)]


async def test_a_block_is_transformed_while_the_one_before_it_is_deflated(tmp_path, kind) -> None:
    async with toy_service(tmp_path, kind=kind) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        meetings, codec = Meetings(BLOCKS), toy.codecs[0]
        analyze, encode = codec.analyze, codec.encode

        def analyzing(raw, **place):
            meetings.earlier_stage()
            return analyze(raw, **place)

        def encoding(body, **place):
            meetings.later_stage()
            return encode(body, **place)

        codec.analyze, codec.encode = analyzing, encoding
        for number, key in enumerate(KEYS):
            await store(toy.service, ns, key=key, data=block(number))
        results = await toy.service.blocks.flush(ns, KEYS, b"", soon())
        await toy.service.blocks.demote(ns, KEYS, b"", soon())
        bodies = [await fetch(toy.service, ns, key) for key in KEYS]

    assert [result.outcome for result in results] == ["stored"] * BLOCKS
    assert bodies == [block(number) for number in range(BLOCKS)]


async def test_a_damaged_record_between_others_is_the_only_one_lost(tmp_path, kind) -> None:
    async with toy_service(tmp_path, kind=kind) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        for number, key in enumerate(KEYS):
            await store(toy.service, ns, key=key, data=block(number))
        await toy.service.blocks.demote(ns, KEYS, b"", soon())
        tenant = toy.service._registry.tenants[TENANT]
        damaged = {1: 5, 4: -1}
        for number, at in damaged.items():
            key = tenant.keys.record_key(ns.digest, b"", KEYS[number])
            envelope, blob = tenant.writer.environment.read(key)
            blob[at] ^= 1
            put = Put(key, envelope, blob)
            await tenant.writer.exclusive(lambda env, put=put: env.write([put], []))
        bodies = await asyncio.gather(*(fetch(toy.service, ns, key) for key in KEYS), return_exceptions=True)
        tiers = [match.tier for match in toy.service.prefixes.match(ns, KEYS, b"").blocks]
        check(toy.catalog)

    for number, body in enumerate(bodies):
        if number in damaged:
            assert isinstance(body, NotFound)
        else:
            assert body == block(number)
    assert tiers == [None if number in damaged else Tier.HOST for number in range(BLOCKS)]


async def test_a_block_in_several_pieces_goes_down_and_comes_up_whole(tmp_path, kind) -> None:
    half = BLOCK_TOKENS // 2
    brim = Policy("brim", host=HostTier("raw", high=1.0, low=1.0))  # nothing moves but what is asked for
    async with toy_service(tmp_path, host=3 * BLOCK_BYTES, kind=kind, policy=brim) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        small = [EngineKey(bytes([100 + number]) * 32) for number in range(6)]
        for number, key in enumerate(small):  # fill the host with halves, then free every other one
            await store(toy.service, ns, key=key, data=block(number, half), durable=True)
        await toy.service.blocks.demote(ns, small[::2], b"", soon())
        data = block(9)
        await store(toy.service, ns, key=KEYS[0], data=data)
        down = [len(pieces) for pieces in toy.memory._copies.values()]
        await toy.service.blocks.demote(ns, KEYS[:1], b"", soon())
        await store(toy.service, ns, key=KEYS[1], data=block(10))  # other bytes where it lay
        await toy.service.blocks.delete(ns, KEYS[1:2], b"")
        body = await fetch(toy.service, ns, KEYS[0])
        up = [len(pieces) for pieces in toy.memory._copies.values()]
        rest = [await fetch(toy.service, ns, key) for key in small]

    assert max(down) == max(up) == 2, "it lay in two pieces both times"
    assert body == data
    assert rest == [block(number, half) for number in range(6)]


async def test_the_time_of_every_stage_is_counted(tmp_path, kind) -> None:
    async with toy_service(tmp_path, kind=kind) as toy:
        ns = await toy.service.register(TENANT, "n", IDENTITY)
        await store(toy.service, ns, key=KEYS[0], data=block(0))
        await toy.service.blocks.demote(ns, KEYS[:1], b"", soon())
        await fetch(toy.service, ns, KEYS[0])
        text = toy.service.metrics_text().decode()

    for pipeline, stages in {
        "promote": ("read", "check", "inflate", "synthesize", "scatter"),
        "demote": ("gather", "analyze", "deflate", "seal", "commit"),
    }.items():
        for stage in stages:
            assert f'kvtcd_stage_seconds_count{{pipeline="{pipeline}",stage="{stage}"}} 1.0' in text
