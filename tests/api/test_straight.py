"""Blocks that go straight into memory of an engine on a GPU; a scripted driver plays two sides."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from support import fake_cuda
from support.fake_driver import Machine, Process
from support.http import NS, running, unhurried, until
from support.patience import PATIENCE_S
from support.placed import get, key, put, span
from support.sharing_engine import Engine
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, ToyCodec, block, soon
from support.twin_memory import TwinMemory

from kvtcd.api.limits import Limits
from kvtcd.core import events as ev
from kvtcd.core.errors import Truncated, UnknownProfile
from kvtcd.core.messages import BlockHead
from kvtcd.core.place import Tier
from kvtcd.core.policy import DiskTier, Policy, Promote
from kvtcd.core.regions import Span
from kvtcd.cuda.imports import Imports

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("other_process")]
ZERO = bytes(BLOCK_BYTES)
LIFTING = {"gpu": 8 * BLOCK_BYTES, "policy": Policy("gpu", promote=Promote("gpu"))}
SOURCES = pytest.mark.parametrize("source", ["disk", "gpu"])


class Site:
    """A daemon whose codec works on the GPU of an engine."""

    def __init__(
        self, machine: Machine, daemon, process: Process, codecs: list[ToyCodec], foreign: TwinMemory
    ) -> None:
        self.daemon, self.process, self.codecs, self.foreign = daemon, process, codecs, foreign
        self.engine = Engine(machine)
        self.region = ""

    @property
    def codec(self) -> ToyCodec:
        return self.codecs[-1]

    @property
    def catalog(self):
        return self.daemon.toy.catalog

    @property
    def namespace(self):
        return self.daemon.toy.service.namespace("uid:1", "demo")

    def record_key(self, number: int):
        return self.daemon.toy.service._registry.record_keys(self.namespace, b"")(key(number))

    def where(self, number: int) -> str:
        return " ".join(map(str, self.catalog.places(self.record_key(number))))

    @property
    def host_bytes(self) -> int:
        return self.catalog.residents.shelves[Tier.HOST].whole.used

    def count(self, name: str, **labels: str) -> float:
        return self.daemon.toy.service.metrics.registry.get_sample_value(f"kvtcd_{name}", labels) or 0.0

    def straight(self, outcome: str = "landed", source: str = "disk") -> float:
        return self.count("straight_reads_total", source=source, outcome=outcome)

    async def packed(self, *numbers: int, memory: bool = False) -> None:
        """Have blocks on disk alone, or packed in host memory too."""
        service = self.daemon.toy.service
        for number in numbers:
            async with service.blocks.batch(self.namespace, b"", soon()) as batch:
                slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, 0), BLOCK_BYTES)
                slot.write(memoryview(block(number)))
                await batch.commit()
        await service.blocks.demote(self.namespace, [key(n) for n in numbers], b"", soon())
        for number in numbers if memory else ():
            self.catalog.room.refill_later(self.record_key(number))
            service._driver.tell(ev.Tick())
        await service._driver.idle()
        places = {self.where(number) for number in numbers}
        assert places == {"packed disk" if memory else "disk"}

    async def lifted(self, *numbers: int) -> None:
        """Have blocks on the GPU."""
        await self.packed(*numbers)
        blocks = self.daemon.toy.service.blocks
        await blocks.prefetch(self.namespace, [key(n) for n in numbers], b"", soon(), tier=Tier.GPU)
        assert {self.where(number) for number in numbers} == {"gpu host disk"}

    async def ready(self, source: str, *numbers: int) -> None:
        """Have blocks on disk alone, or on the GPU."""
        await (self.lifted if source == "gpu" else self.packed)(*numbers)

    def held_up(self) -> threading.Event:
        """Let what goes straight wait for an event."""
        gate = threading.Event()
        self.foreign.before = lambda: gate.wait(PATIENCE_S)
        return gate


@asynccontextmanager
async def site(machine: Machine, limits: Limits | None = None, kind: str = "threads", **toy):
    process, codecs = Process(machine), []

    def find(memory):
        allocation, offset = process._find(memory.pointer)
        return memoryview(allocation.data)[offset : offset + memory.nbytes]

    foreign = TwinMemory(find)

    def codec(identity, choice):
        made = ToyCodec(identity, kind=kind, foreign=foreign)
        if choice.name != "lossless":  # which is for what is packed in a hurry
            codecs.append(made)
        return made

    options = {"codec": codec, "foreign": foreign, "kind": kind, **toy}
    async with running(limits, devices=Imports(process.driver), **options) as daemon:
        await daemon.register()
        made = Site(machine, daemon, process, codecs, foreign)
        made.region = await made.engine.share(daemon)
        yield made
    assert not process.imported, "nothing is left open"


@pytest.mark.parametrize("kind", ["threads", "stand-in"])
@pytest.mark.parametrize("memory", [False, True])
async def test_packed_blocks_are_unpacked_there_and_nothing_raw_is_on_the_host(
    machine, monkeypatch, memory, kind
):
    fake_cuda.install(monkeypatch)
    async with site(machine, kind=kind) as here:
        await here.packed(0, 1, 2, memory=memory)
        used, source = here.host_bytes, "packed" if memory else "disk"
        larger = Span(2 * BLOCK_BYTES, BLOCK_BYTES + 5)
        asked = ((key(2), span(0)), (key(9), span(1)), (key(0), span(7)), (key(1), larger))
        status, answer = await get(here.daemon, here.region, *asked)
        assert status == 200
        hit = ("hit", BLOCK_BYTES, "host" if memory else "disk")
        found = [(row["status"], row["bytes"], row.get("tier")) for row in answer["blocks"]]
        assert found == [hit, ("miss", 0, None), hit, hit]
        want = [block(2), ZERO, block(1), *[ZERO] * 4, block(0)]
        assert [here.engine.read(place) for place in range(8)] == want
        assert here.process.calls["cuMemcpyHtoDAsync_v2"] == 0, "no raw byte crosses the bus"
        assert here.host_bytes == used
        assert here.where(0) == ("packed disk" if memory else "disk")
        assert here.straight(source=source) == 3
        assert here.count("gets_total", found=source) == 3
        assert here.count("gets_total", found="nowhere") == 1
        path = f"{NS}/blocks/{key(1).hex()}?region={here.region}&offset=0&length={BLOCK_BYTES}"
        async with here.daemon.request("GET", path) as one:
            assert (one.status, (await one.json())["bytes"]) == (200, BLOCK_BYTES)
        assert here.engine.read(0) == block(1)


@pytest.mark.parametrize("kind", ["threads", "stand-in"])
async def test_copies_on_that_gpu_are_copied_there_and_nothing_crosses_the_bus(machine, monkeypatch, kind):
    fake_cuda.install(monkeypatch)
    async with site(machine, kind=kind, **LIFTING) as here:
        await here.lifted(0, 1)
        await here.packed(2)
        _, answer = await get(
            here.daemon, here.region, (key(1), span(3)), (key(2), span(0)), (key(0), span(1))
        )
        assert [row.get("tier") for row in answer["blocks"]] == ["gpu", "disk", "gpu"]
        assert [here.engine.read(place) for place in range(4)] == [block(2), block(0), ZERO, block(1)]
        assert here.process.calls["cuMemcpyHtoDAsync_v2"] == 0
        assert (here.straight(source="gpu"), here.straight(source="disk")) == (2, 1)
        assert here.count("gets_total", found="gpu") == 2


async def test_a_copy_on_another_gpu_goes_over_the_host(machine):
    policy = Policy("gpu", promote=Promote("cuda:1"))
    sizes = {"cuda:0": BLOCK_BYTES, "cuda:1": BLOCK_BYTES}
    async with site(machine, gpu=sizes, policy=policy) as here:
        await here.lifted(0)
        await get(here.daemon, here.region, (key(0), span(2)))
        assert here.engine.read(2) == block(0)
        assert here.straight(source="gpu") == 0
        assert here.process.calls["cuMemcpyHtoDAsync_v2"]


async def test_a_copy_whose_gpu_is_home_no_more_goes_behind_its_reader(machine):
    sizes = {"cuda:0": BLOCK_BYTES, "cuda:1": BLOCK_BYTES}
    async with site(machine, gpu=sizes, policy=Policy("gpu", promote=Promote("gpu"))) as here:
        await here.lifted(0)
        gate = here.held_up()
        reading = asyncio.create_task(get(here.daemon, here.region, (key(0), span(0))))
        await until(lambda: here.catalog.residents.pins)
        await here.daemon.toy.service.reload((Policy("gpu", promote=Promote("cuda:1")),))
        assert here.where(0) == "host disk"
        memory = here.daemon.toy.gpus["cuda:0"]
        assert here.record_key(0) in memory._blocks, "somebody reads it"
        gate.set()
        await reading
        assert here.engine.read(0) == block(0)
        assert not memory._blocks


async def test_a_raw_copy_is_copied_from_the_host(machine):
    async with site(machine) as here:
        await put(here.daemon, here.region, (BlockHead(key(1), BLOCK_TOKENS, 0), span(3)))
        await get(here.daemon, here.region, (key(1), span(0)))
        assert here.process.calls["cuMemcpyHtoDAsync_v2"]
        assert here.straight() == 0


async def test_the_codec_of_another_gpu_goes_over_the_host(machine):
    async with site(machine) as here:
        await here.packed(1)
        here.codec.foreign.gpu = 1
        await get(here.daemon, here.region, (key(1), span(0)))
        assert here.engine.read(0) == block(1)
        assert here.where(1) == "host disk"
        assert here.straight() == 0


async def test_where_a_part_is_not_aligned_for_kernels_the_block_goes_over_the_host(machine):
    async with site(machine) as here:
        await here.packed(1)
        await get(here.daemon, here.region, (key(1), Span(8, BLOCK_BYTES)))
        assert here.engine.read(0)[8:] == block(1)[:-8]
        assert here.straight() == 0


async def test_a_part_that_is_too_small_is_refused_and_not_written(machine):
    async with site(machine) as here:
        await here.packed(1)
        status, answer = await get(here.daemon, here.region, (key(1), span(3, BLOCK_BYTES - 1)))
        assert (status, answer["field"]) == (400, "length")
        assert here.engine.read(3) == ZERO


async def test_a_full_host_is_no_obstacle(machine):
    policy = Policy("evict", disk=DiskTier("evict"))
    async with site(machine, host=2 * BLOCK_BYTES, policy=policy) as here:
        await here.packed(0)
        service = here.daemon.toy.service
        async with service.blocks.batch(here.namespace, b"", soon()) as batch:
            for number in (1, 2):
                slot = await batch.reserve(BlockHead(key(number), BLOCK_TOKENS, 0), BLOCK_BYTES)
                assert slot is not None
            assert here.catalog.residents.shelves[Tier.HOST].tight(here.namespace.number, BLOCK_BYTES)
            await get(here.daemon, here.region, (key(0), span(0)))
            assert here.engine.read(0) == block(0)


@SOURCES
async def test_many_read_one_block_at_once_each_into_memory_of_his_own(machine, source):
    async with site(machine, **LIFTING) as here:
        await here.ready(source, 0)
        await asyncio.gather(*(get(here.daemon, here.region, (key(0), span(n))) for n in range(8)))
        assert [here.engine.read(place) for place in range(8)] == [block(0)] * 8
        assert here.straight(source=source) == 8
        assert not here.catalog.residents.pins


@SOURCES
async def test_the_first_byte_is_written_when_the_engine_is_done(machine, source):
    async with site(machine, **LIFTING) as here:
        await here.ready(source, 5)
        with here.engine.work() as queued:
            queued.append(lambda: here.engine.write(0, block(9)))
            here.engine.exported.record(here.engine.stream)
            reading = asyncio.create_task(get(here.daemon, here.region, (key(5), span(0))))
            await until(lambda: here.process.calls["cuEventQuery"] > 3)
            assert here.foreign.asked == []
        await reading
        assert here.engine.read(0) == block(5), "what was queued before is over by then"
        assert here.straight(source=source) == 1


@SOURCES
async def test_who_is_never_done_holds_up_one_request(machine, source):
    async with site(machine, unhurried(shutdown_s=2, stall_s=0.3), **LIFTING) as here:
        await here.ready(source, 5)
        with here.engine.work() as queued:
            queued.append(lambda: None)
            here.engine.exported.record(here.engine.stream)
            status, answer = await get(here.daemon, here.region, (key(5), span(0)))
            assert (status, [row["status"] for row in answer["blocks"]]) == (200, ["miss"])
            path = f"{NS}/blocks/{key(5).hex()}?region={here.region}&offset=0&length={BLOCK_BYTES}"
            async with here.daemon.request("GET", path) as one:
                assert one.status == 504
        assert not here.catalog.residents.pins
        assert here.engine.read(0) == ZERO


async def test_a_damaged_record_is_dropped_and_missed(machine, monkeypatch):
    async with site(machine) as here:
        await here.packed(0)
        writer = here.daemon.toy.service._registry.tenants["uid:1"].writer
        read = writer.environment.read

        def flipped(record_key, take):
            envelope, blob = read(record_key, take)
            blob[-1] ^= 1
            return envelope, blob

        monkeypatch.setattr(writer.environment, "read", flipped)
        status, answer = await get(here.daemon, here.region, (key(0), span(0)))
        assert (status, [row["status"] for row in answer["blocks"]]) == (200, ["miss"])
        assert here.engine.read(0) == ZERO, "not a byte was decoded"
        await until(lambda: here.record_key(0) not in here.catalog.residents.entries)
        assert here.straight("damaged") == 1
        assert (
            here.count("damaged_records_total", error="BadChecksum")
            + here.count("damaged_records_total", error="BadMac")
            == 1
        )
        assert here.count("lost_total", reason="damaged") == 1
        assert here.count("gets_total", found="nowhere") == 1


async def test_behind_a_damaged_copy_in_memory_the_one_on_disk_is_read(machine, monkeypatch):
    async with site(machine) as here:
        await here.packed(0, memory=True)
        gather = here.codec.inflate
        first = iter([Truncated("blob", "is cut short")])

        def inflate(blob, scratch):
            for error in first:
                raise error
            return gather(blob, scratch)

        monkeypatch.setattr(here.codec, "inflate", inflate)
        await get(here.daemon, here.region, (key(0), span(0)))
        assert here.engine.read(0) == block(0)
        assert here.where(0) == "host disk"


@pytest.mark.parametrize("found", [True, False])
async def test_a_profile_that_is_missing_is_asked_for_elsewhere(machine, monkeypatch, found):
    async with site(machine) as here:
        await here.packed(0)
        inflate, asked = here.codec.inflate, []

        def without(blob, scratch):
            if not asked or not found:
                raise UnknownProfile(b"\7" * 32)
            return inflate(blob, scratch)

        async def missing(digest):
            asked.append(digest)
            return found

        monkeypatch.setattr(here.codec, "inflate", without)
        monkeypatch.setattr(here.daemon.toy.service._driver._mover, "missing", missing)
        _, answer = await get(here.daemon, here.region, (key(0), span(0)))
        assert asked == [b"\7" * 32]
        assert answer["blocks"][0]["status"] == ("hit" if found else "miss")
        assert here.engine.read(0) == (block(0) if found else ZERO)
        assert here.straight("landed" if found else "damaged") == 1


@SOURCES
@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), StopIteration])
async def test_what_fails_there_goes_over_the_host(machine, error, source):
    async with site(machine, **LIFTING) as here:
        await here.ready(source, 0)

        def broken():
            raise error

        here.foreign.before = broken
        await get(here.daemon, here.region, (key(0), span(0)))
        assert here.engine.read(0) == block(0)
        assert "host" in here.where(0)
        assert here.process.calls["cuMemcpyHtoDAsync_v2"]
        assert here.count("internal_errors_total", where="mover") == 1


@SOURCES
@pytest.mark.parametrize("way", ["delete", "purge", "expire"])
async def test_what_is_to_be_forgotten_waits_until_it_is_read(machine, way, source):
    policy = Policy("ttl", disk=DiskTier(ttl=1000), promote=Promote("gpu"))
    async with site(machine, **(LIFTING | {"policy": policy})) as here:
        await here.ready(source, 0)
        gate, record_key = here.held_up(), here.record_key(0)
        reading = asyncio.create_task(get(here.daemon, here.region, (key(0), span(0))))
        await until(lambda: here.catalog.residents.pins)
        forgetting = None
        if way == "expire":
            entry = here.catalog.residents.entries[record_key]
            entry.expires = 0
            here.daemon.toy.service._driver.tell(ev.Tick())
        else:
            path = NS if way == "purge" else f"{NS}/blocks/{key(0).hex()}"
            forgetting = asyncio.create_task(here.daemon.session.delete(f"http://kvtcd{path}"))
        await until(lambda: not here.catalog.places(record_key))
        assert record_key in here.catalog.residents.entries
        assert forgetting is None or not forgetting.done()
        gate.set()
        _, answer = await reading
        assert answer["blocks"][0]["status"] == "hit"
        assert here.engine.read(0) == block(0)
        if forgetting:
            assert (await forgetting).status in {200, 204}
        await until(lambda: record_key not in here.catalog.residents.entries)


@SOURCES
@pytest.mark.parametrize("way", ["recall", "die"])
async def test_a_region_that_ends_is_let_go_of_when_nothing_writes_there(machine, way, source):
    async with site(machine, **LIFTING) as here:
        await here.ready(source, 0, 1)
        gate = here.held_up()
        reading = asyncio.create_task(get(here.daemon, here.region, (key(0), span(0)), (key(1), span(1))))
        await until(lambda: here.catalog.residents.pins)
        if way == "die":
            here.engine.connection.close()
            ended = None
        else:
            ended = asyncio.create_task(asyncio.to_thread(here.engine.recall))
        await until(lambda: here.count("regions", kind="device") == 0)
        assert here.process.imported, "it is written to"
        assert ended is None or not ended.done()
        gate.set()
        await reading
        assert ended is None or await ended == b""
        await until(lambda: not here.process.imported)
        assert (await get(here.daemon, here.region, (key(0), span(0))))[0] == 404
        here.engine.free()
        assert not here.catalog.residents.pins


async def test_a_region_that_has_ended_is_said_to_be_so_and_is_no_miss(machine):
    async with site(machine, unhurried(shutdown_s=2)) as here:
        await here.packed(0)
        with here.engine.work() as queued:
            queued.append(lambda: None)
            here.engine.exported.record(here.engine.stream)
            reading = asyncio.create_task(get(here.daemon, here.region, (key(0), span(0))))
            await until(lambda: here.process.calls["cuEventQuery"] > 3)
            assert await asyncio.to_thread(here.engine.recall) == b""
            status, answer = await reading
            assert (status, answer["what"]) == (404, "region")
        assert not here.catalog.residents.pins


@SOURCES
async def test_who_goes_away_leaves_nothing_pinned_and_nothing_open(machine, source):
    async with site(machine, **LIFTING) as here:
        await here.ready(source, 0)
        gate = here.held_up()
        reading = asyncio.create_task(get(here.daemon, here.region, (key(0), span(0))))
        await until(lambda: here.catalog.residents.pins)
        reading.cancel()
        await asyncio.wait([reading])
        assert here.catalog.residents.pins, "its memory is written to"
        gate.set()
        await until(lambda: not here.catalog.residents.pins)


@SOURCES
async def test_a_device_that_is_lost_gives_what_the_host_has_and_lets_go_of_everything(
    machine, monkeypatch, source
):
    fake_cuda.install(monkeypatch)
    async with site(machine, kind="stand-in", **LIFTING) as here:
        await here.ready(source, 0)
        fake_cuda.break_down(monkeypatch, "synchronize")
        status, answer = await get(here.daemon, here.region, (key(0), span(0)))
        found = "hit" if source == "gpu" else "miss"
        assert (status, [row["status"] for row in answer["blocks"]]) == (200, [found])
        assert here.straight("failed", source) == 1
        assert here.where(0).endswith("disk"), "the record is unharmed"
        assert not here.catalog.residents.pins
        assert await asyncio.to_thread(here.engine.recall) == b""
