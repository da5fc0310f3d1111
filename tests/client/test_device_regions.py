"""Both clients with memory on a GPU: the fastest way that works is taken, and why no faster one is said."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from support.fake_driver import ILLEGAL, Machine, Process
from support.http import running, unhurried, until
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, block

from kvtcd.api.state import REGIONS
from kvtcd.client import AsyncClient, BlockHead, Client
from kvtcd.core.errors import BadRequest, TooLarge, Unavailable
from kvtcd.core.keys import EngineKey
from kvtcd.cuda.imports import Imports

pytestmark = pytest.mark.asyncio
BLOCKS = 6


class InThread:
    """The client for threads with the face of the other."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: asyncio.to_thread(getattr(self.client, name), *args, **kwargs)


@pytest.fixture(params=[InThread, AsyncClient])
def kind(request):
    return request.param


@pytest.fixture
def machine():
    found = Machine()
    yield found
    assert found.faults == []


@pytest.fixture
def engine(machine, monkeypatch) -> Process:
    """The process in which the client runs, as the driver sees it; the daemon is another."""
    process = Process(machine)
    driver = process.driver()
    monkeypatch.setattr("kvtcd.cuda.driver.Driver.load", lambda: driver)
    monkeypatch.setattr("kvtcd.api.side.is_own", lambda _: False)
    return process


@pytest.fixture
def memory(engine) -> int:
    driver = engine.driver()
    with driver.current(driver.retain(0)):
        return driver.allocate(BLOCKS * BLOCK_BYTES + 64)


@pytest_asyncio.fixture
async def daemon(machine):
    process = Process(machine)
    async with running(devices=Imports(process.driver)) as found:
        yield found
    if not process.sticky:
        assert not process.imported


@asynccontextmanager
async def sharing(kind, daemon, memory: int):
    client = kind(str(daemon.socket))
    await client.register("demo", IDENTITY)
    region = await client.device_region((memory + 64, BLOCKS * BLOCK_BYTES))
    yield client, region
    await asyncio.to_thread(region.close)
    await client.close()


def key(number: int) -> EngineKey:
    return EngineKey(bytes([number]) * 32)


def head(number: int) -> BlockHead:
    return BlockHead(key(number), BLOCK_TOKENS, 0)


def part(region, place: int):
    return region[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]


class On:
    """What lies at the places of the region."""

    def __init__(self, engine: Process, memory: int) -> None:
        self.engine, self.begin = engine, memory + 64

    def __setitem__(self, place: int, data: bytes) -> None:
        self.engine.set(self.begin + place * BLOCK_BYTES, data)

    def __getitem__(self, place: int) -> bytes:
        return self.engine.bytes_at(self.begin + place * BLOCK_BYTES, BLOCK_BYTES)


async def there_and_back(client, region, on: On) -> None:
    """Store and read blocks one by one and together."""
    for place in range(3):
        on[place] = block(place)
    assert (await client.put("demo", head(0), part(region, 0))).outcome == "stored"
    results = await client.put_many("demo", [(head(n), part(region, n)) for n in (1, 2)])
    assert [result.outcome for result in results] == ["stored"] * 2
    for place in range(BLOCKS):
        on[place] = bytes(BLOCK_BYTES)
    asked = [key(2), key(9), key(1)]
    parts = [part(region, place) for place in (5, 0, 3)]
    assert await client.fill("demo", asked, parts) == [BLOCK_BYTES, None, BLOCK_BYTES]
    zero = bytes(BLOCK_BYTES)
    assert [on[place] for place in range(BLOCKS)] == [zero, zero, zero, block(1), zero, block(2)]


async def test_blocks_on_a_gpu_are_not_sent(kind, daemon, engine, memory, monkeypatch):
    monkeypatch.setattr("kvtcd.client.endpoints.put_group", None)
    async with sharing(kind, daemon, memory) as (client, region):
        assert (region.path, region.why, len(region)) == ("device", "", BLOCKS * BLOCK_BYTES)
        await there_and_back(client, region, On(engine, memory))
        assert not engine.calls["cuMemcpyDtoHAsync_v2"], "this process copies nothing"
    assert (region.path, region.why, region.closed) == ("http", "the region is closed", True)
    assert daemon.app[REGIONS].nbytes == 0, "before the memory may be freed"
    driver = engine.driver()
    with driver.current(driver.retain(0)):
        driver.free(memory)


async def test_memory_without_a_handle_goes_through_a_region_of_the_host(kind, daemon, engine, memory):
    (allocation,) = engine.memory.values()
    allocation.exportable = False
    async with sharing(kind, daemon, memory) as (client, region):
        assert region.path == "region"
        assert "expandable_segments" in region.why
        await there_and_back(client, region, On(engine, memory))
        mixed = [(head(7), part(region, 3)), (head(8), block(8))]
        assert [r.outcome for r in await client.put_many("demo", mixed)] == ["stored"] * 2
        buffer = bytearray(BLOCK_BYTES)
        assert await client.fill("demo", [key(8), key(7)], [buffer, part(region, 0)]) == [BLOCK_BYTES] * 2
        assert (bytes(buffer), On(engine, memory)[0]) == (block(8), block(1))


async def test_where_nothing_can_be_shared_it_goes_over_http_and_both_reasons_are_said(kind, engine, memory):
    async with (
        running(unhurried(shutdown_s=2, region_bytes=4096)) as daemon,
        sharing(kind, daemon, memory) as (client, region),
    ):
        assert region.path == "http"
        assert "regions is false in [gpu]" in region.why
        assert "the limit is 4096" in region.why
        await there_and_back(client, region, On(engine, memory))


def later(now=time.monotonic) -> float:
    return now() + 100


async def test_a_refusal_is_remembered_for_a_while(kind, engine, memory, monkeypatch):
    async with running() as daemon, sharing(kind, daemon, memory) as (client, region):
        sample = daemon.toy.service.metrics.registry.get_sample_value
        reason = {"kind": "device", "reason": "device-regions-off"}
        await there_and_back(client, region, On(engine, memory))
        assert sample("kvtcd_refused_regions_total", reason) == 1
        monkeypatch.setattr("kvtcd.client.sharing.time", SimpleNamespace(monotonic=later))
        await client.fill("demo", [key(1)], [part(region, 0)])
        assert sample("kvtcd_refused_regions_total", reason) == 2


async def test_a_gpu_that_fails_in_the_daemon_does_not_fail_the_client(kind, machine, engine, memory):
    process = Process(machine)
    async with (
        running(devices=Imports(process.driver)) as daemon,
        sharing(kind, daemon, memory) as (client, region),
    ):
        process.script["cuMemcpyDtoHAsync_v2"] = ILLEGAL
        await there_and_back(client, region, On(engine, memory))
        assert region.path == "region"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in region.why


async def test_a_region_that_the_daemon_has_lost_is_opened_again(kind, daemon, engine, memory):
    async with sharing(kind, daemon, memory) as (client, region):
        (side,) = daemon.runner.side_sockets
        for connection in list(side._open):
            side._end(connection)
        await until(lambda: not daemon.app[REGIONS].nbytes)
        await there_and_back(client, region, On(engine, memory))
        assert region.path == "device"


async def test_what_was_queued_is_waited_for_on_every_way(kind, daemon, engine, memory):
    driver = engine.driver()
    with driver.current(driver.retain(0)):
        stream = driver.create_stream()
    on = On(engine, memory)
    async with sharing(kind, daemon, memory) as (client, region):
        work = engine.things[stream]
        work.queued.append(lambda: on.__setitem__(0, block(4)))
        region.record(stream)
        storing = asyncio.ensure_future(client.put("demo", head(4), part(region, 0)))
        await asyncio.sleep(0.05)
        assert not storing.done()
        work.run()
        assert (await storing).outcome == "stored"
        assert bytes(await client.get("demo", key(4))) == block(4)


async def test_a_part_is_a_run_of_bytes_within(kind, daemon, memory):
    async with sharing(kind, daemon, memory) as (client, region):
        assert region[:].nbytes == len(region)
        assert region[-5:].nbytes == 5
        for wrong in (slice(0, 10, 2), slice(5, 5), slice(len(region), None), slice(9, 3)):
            with pytest.raises(BadRequest, match="part: "):
                _ = region[wrong]
        with pytest.raises(BadRequest, match="has 1 buffers for 2 keys"):
            await client.fill("demo", [key(1), key(2)], [region[:]])


async def test_a_daemon_that_does_not_let_go_is_told_of(kind, daemon, memory, monkeypatch):
    monkeypatch.setattr("kvtcd.client.device.OPEN_S", 0.2)
    client = kind(str(daemon.socket))
    region = await client.device_region((memory + 64, BLOCKS * BLOCK_BYTES))
    regions = daemon.app[REGIONS]
    ((_, held),) = regions._regions.values()
    with held.in_use(), pytest.raises(Unavailable, match="do not free it"):
        await asyncio.to_thread(region.close)
    await client.close()
    await until(lambda: not regions._closing)


async def test_memory_that_is_none_is_refused_and_a_large_one_is_bounded(kind, machine, memory):
    process = Process(machine)
    async with running(
        unhurried(shutdown_s=2, device_region_bytes=10), devices=Imports(process.driver)
    ) as daemon:
        client = kind(str(daemon.socket))
        with pytest.raises(BadRequest, match="memory: "):
            await client.device_region(b"bytes")
        region = await client.device_region((memory, 100))
        assert (region.path, region.why) == ("region", str(TooLarge("region", 100, 10)))
        await asyncio.to_thread(region.close)
        await client.close()
