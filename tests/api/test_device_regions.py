"""Regions on a GPU, from the side socket to the bytes of blocks; a scripted driver plays two processes."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.fake_driver import BAD_HANDLE, ILLEGAL, Machine, Process
from support.http import NS, TENANT_HEADER, Daemon, running, unhurried, until
from support.placed import get, key, put, span
from support.sharing_engine import BLOCKS, SIZE, Engine
from support.toy import BLOCK_BYTES, BLOCK_TOKENS, block

from kvtcd.api.limits import Limits
from kvtcd.api.state import REGIONS
from kvtcd.core.access import Caller, Scope
from kvtcd.core.messages import BlockHead
from kvtcd.core.regions import HELLO, side_socket
from kvtcd.cuda.imports import Imports

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("other_process")]


@asynccontextmanager
async def daemon_of(machine: Machine, limits: Limits | None = None, **toy):
    process = Process(machine)
    async with running(limits, devices=Imports(process.driver), **toy) as daemon:
        yield daemon, process
    assert not process.imported, "nothing is left open"
    assert not +process.contexts


def head(number: int) -> BlockHead:
    return BlockHead(key(number), BLOCK_TOKENS, 0)


def gauge(daemon: Daemon, name: str, **labels: str) -> float:
    return daemon.toy.service.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_blocks_go_to_and_from_a_gpu(machine):
    async with daemon_of(machine) as (daemon, _):
        await daemon.register()
        engine = Engine(machine)
        region = await engine.share(daemon)
        assert engine.answer["bytes"] == SIZE
        assert gauge(daemon, "kvtcd_regions", kind="device") == 1
        assert gauge(daemon, "kvtcd_region_bytes", kind="device") == SIZE
        for place in range(3):
            engine.write(place, block(place))
        status, answer = await put(daemon, region, *((head(n), span(n)) for n in range(3)))
        assert (status, [row["outcome"] for row in answer["results"]]) == (200, ["stored"] * 3)

        for place in range(3):
            engine.write(place, bytes(BLOCK_BYTES))
        status, answer = await get(daemon, region, (key(2), span(0)), (key(9), span(1)), (key(0), span(7)))
        assert [(row["status"], row["bytes"]) for row in answer["blocks"]] == [
            ("hit", BLOCK_BYTES), ("miss", 0), ("hit", BLOCK_BYTES),
        ]  # fmt: skip
        zero = bytes(BLOCK_BYTES)
        assert [engine.read(place) for place in range(8)] == [block(2), *[zero] * 6, block(0)]

        async with daemon.request("GET", f"{NS}/blocks/{key(1).hex()}") as answer:
            assert await answer.read() == block(1)
        assert await asyncio.to_thread(engine.recall) == b""
        engine.free()
        assert gauge(daemon, "kvtcd_region_bytes", kind="device") == 0


async def test_the_daemon_waits_for_what_the_engine_has_queued(machine):
    async with daemon_of(machine) as (daemon, process):
        await daemon.register()
        engine = Engine(machine)
        region = await engine.share(daemon)
        with engine.work() as queued:
            queued.append(lambda: engine.write(0, block(5)))
            engine.exported.record(engine.stream)
            storing = asyncio.create_task(put(daemon, region, (head(5), span(0))))
            await until(lambda: process.calls["cuEventQuery"] > 3)
            assert not storing.done()
            assert not process.calls["cuMemcpyDtoHAsync_v2"], "nothing is put behind another's event"
        assert (await storing)[1]["results"][0]["outcome"] == "stored"

        with engine.work() as queued:
            queued.append(lambda: engine.write(0, block(9)))
            engine.exported.record(engine.stream)
            reading = asyncio.create_task(get(daemon, region, (key(5), span(0))))
            before = process.calls["cuEventQuery"]
            await until(lambda: process.calls["cuEventQuery"] > before + 3)
            assert not process.calls["cuMemcpyHtoDAsync_v2"]
        await reading
        assert engine.read(0) == block(5), "what was queued before is over by then"


async def test_work_that_never_ends_holds_up_one_request_and_not_the_end_of_the_region(machine):
    async with daemon_of(machine, unhurried(shutdown_s=2)) as (daemon, process):
        await daemon.register()
        stuck, well = Engine(machine), Engine(machine)
        region, other = await stuck.share(daemon), await well.share(daemon)
        with stuck.work() as queued:
            queued.append(lambda: None)
            stuck.exported.record(stuck.stream)
            storing = asyncio.create_task(put(daemon, region, (head(1), span(0))))
            await until(lambda: process.calls["cuEventQuery"] > 3)
            well.write(0, block(2))
            assert (await put(daemon, other, (head(2), span(0))))[1]["results"][0]["outcome"] == "stored"
            assert not storing.done()
            assert await asyncio.to_thread(stuck.recall) == b""
            status, answer = await storing
            assert (status, answer["what"]) == (404, "region")
        assert daemon.blocks() == 1


async def test_who_waits_for_work_that_never_ends_is_told_so_when_his_time_is_over(machine):
    async with daemon_of(machine, unhurried(shutdown_s=2, stall_s=0.1)) as (daemon, _):
        await daemon.register()
        engine = Engine(machine)
        region = await engine.share(daemon)
        with engine.work() as queued:
            queued.append(lambda: None)
            engine.exported.record(engine.stream)
            status, answer = await put(daemon, region, (head(1), span(0)))
            assert (status, answer["type"]) == (504, "urn:kvtcd:error:deadline-exceeded")
            assert await asyncio.to_thread(engine.recall) == b""
        assert daemon.blocks() == 0


async def test_an_engine_that_goes_takes_its_region_with_it(machine):
    async with daemon_of(machine) as (daemon, process):
        await daemon.register()
        engine = Engine(machine)
        region = await engine.share(daemon)
        engine.connection.close()
        await until(lambda: not process.imported)
        assert (await put(daemon, region, (head(1), span(0))))[0] == 404
        engine.free()


async def test_who_ends_a_region_learns_when_its_memory_is_let_go_of(machine):
    async with daemon_of(machine) as (daemon, process):
        engine = Engine(machine)
        await engine.share(daemon)
        with machine.lock:  # the driver takes its time
            ended = asyncio.create_task(asyncio.to_thread(engine.recall))
            await until(lambda: not daemon.app[REGIONS].nbytes)
            await asyncio.sleep(0.05)
            assert not ended.done()
        assert await ended == b""
        assert not process.imported


async def test_who_goes_while_his_memory_is_opened_shares_nothing(machine):
    async with daemon_of(machine) as (daemon, process):
        engine = Engine(machine)
        with machine.lock:  # the driver takes its time
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(side_socket(str(daemon.socket)))
            connection.send(HELLO + json.dumps(engine.exported.offer().to_json()).encode())
            regions = daemon.app[REGIONS]
            await until(lambda: regions.nbytes == SIZE)
            connection.close()
            await asyncio.sleep(0.05)
        await until(lambda: process.calls["cuIpcCloseMemHandle"])
        assert process.calls["cuIpcOpenMemHandle_v2"] == 1
        assert not regions.nbytes
        engine.free()


async def test_a_gpu_that_fails_takes_all_its_regions_and_is_asked_no_more(machine):
    async with daemon_of(machine) as (daemon, process):
        await daemon.register()
        engines = [Engine(machine), Engine(machine)]
        regions = [await engine.share(daemon) for engine in engines]
        process.script["cuMemcpyDtoHAsync_v2"] = ILLEGAL
        status, answer = await put(daemon, regions[0], (head(1), span(0)))
        assert (status, answer["what"]) == (404, "region"), "so that a client takes another way at once"
        for engine, region in zip(engines, regions, strict=True):
            assert await asyncio.to_thread(engine.connection.recv, 1) == b"", "the connection ends"
            assert (await get(daemon, region, (key(1), span(0))))[0] == 404
        assert gauge(daemon, "kvtcd_failed_devices_total") == 1
        assert gauge(daemon, "kvtcd_regions", kind="device") == 0
        process.script.clear()
        again = await asyncio.to_thread(engines[0].offer, daemon)
        assert again["type"] == "urn:kvtcd:error:device-failed"
        assert gauge(daemon, "kvtcd_failed_devices_total") == 1
        assert gauge(daemon, "kvtcd_refused_regions_total", kind="device", reason="device-failed") == 1
        for allocation in process.imported:  # as the end of the process would
            allocation.opened_by.clear()
        process.memory.clear()
        process.contexts.clear()


async def test_memory_that_cannot_be_copied_is_dropped_alone(machine):
    async with daemon_of(machine) as (daemon, process):
        await daemon.register()
        engines = [Engine(machine), Engine(machine)]
        regions = [await engine.share(daemon) for engine in engines]
        process.script["cuMemcpyDtoHAsync_v2"] = BAD_HANDLE
        assert (await put(daemon, regions[0], (head(1), span(0))))[0] == 404
        process.script.clear()
        assert await asyncio.to_thread(engines[0].connection.recv, 1) == b""
        engines[1].write(0, block(2))
        assert (await put(daemon, regions[1], (head(2), span(0))))[0] == 200
        assert gauge(daemon, "kvtcd_failed_devices_total") == 0


async def test_a_region_is_its_tenants_alone_and_so_is_its_handle(machine):
    tenants = iter(["uid:1", "uid:2", "uid:2"])
    process = Process(machine)
    identify = lambda _: Caller(next(tenants), frozenset({Scope.DATA}))  # noqa: E731 - one expression
    async with running(devices=Imports(process.driver), identify_peer=identify) as daemon:
        await daemon.register()
        await daemon.register(**{TENANT_HEADER: "uid:2"})
        engine, thief = Engine(machine), Engine(machine)
        region = await engine.share(daemon)
        for call, what in ((put, head(0)), (get, key(0))):
            foreign = await call(daemon, region, (what, span(0)), **{TENANT_HEADER: "uid:2"})
            assert foreign == await call(daemon, "0" * 32, (what, span(0)), **{TENANT_HEADER: "uid:2"})
            assert foreign[0] == 404
        stolen = await asyncio.to_thread(thief.offer, daemon, engine.exported.offer().to_message())
        assert stolen["type"] == "urn:kvtcd:error:bad-handle"
        assert await thief.share(daemon), "what is his own he may share"


async def test_nothing_is_read_or_written_beyond_a_part(machine):
    async with daemon_of(machine) as (daemon, _):
        await daemon.register()
        engine = Engine(machine)
        region = await engine.share(daemon)
        engine.write(0, block(0))
        await put(daemon, region, (head(0), span(0)))
        for wrong in (span(BLOCKS), span(BLOCKS - 1, BLOCK_BYTES + 1)):
            assert (await put(daemon, region, (head(1), wrong)))[1]["field"] == "offset"
            assert (await get(daemon, region, (key(0), wrong)))[1]["field"] == "offset"
        status, answer = await get(daemon, region, (key(0), span(3, BLOCK_BYTES - 1)))
        assert (status, answer["field"]) == (400, "length")
        assert engine.read(3) == bytes(BLOCK_BYTES)
        beyond = replace(engine.exported.offer(), nbytes=SIZE + 1)
        answer = await asyncio.to_thread(Engine(machine).offer, daemon, beyond.to_message())
        assert (answer["status"], answer["field"]) == (400, "offset")


async def test_regions_of_both_kinds_are_bounded(machine):
    limits = unhurried(shutdown_s=2, regions=2, device_region_bytes=2 * SIZE - 1)
    async with daemon_of(machine, limits) as (daemon, _):
        first, second, third = Engine(machine), Engine(machine), Engine(machine)
        assert await first.share(daemon)
        assert (await asyncio.to_thread(second.offer, daemon))["type"] == "urn:kvtcd:error:too-large"
        small = replace(second.exported.offer(), nbytes=SIZE - 1)
        assert await second.share(daemon, small.to_message())
        assert (await asyncio.to_thread(third.offer, daemon))["type"] == "urn:kvtcd:error:busy"
        second.connection.close()
        await until(lambda: daemon.app[REGIONS].nbytes == SIZE)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (HELLO, 400),
        (HELLO + b"{}", 400),
        (HELLO + b"nonsense", 400),
        (HELLO + b"{" + b" " * 2000 + b"}", 400),
        (b"KVTM\x02\x00{}", 400),
    ],
)
async def test_what_is_no_offer_is_refused(machine, message, status):
    async with daemon_of(machine) as (daemon, process):
        engine = Engine(machine)
        assert (await asyncio.to_thread(engine.offer, daemon, message))["status"] == status
        assert engine.connection.recv(1) == b""
        assert not process.calls, "nothing of it comes near the driver"


async def test_a_daemon_that_may_not_says_so_and_loads_nothing(machine):
    async with running() as daemon:
        answer = await asyncio.to_thread(Engine(machine).offer, daemon)
        assert answer["type"] == "urn:kvtcd:error:device-regions-off"
        assert {lane.name for lane in daemon.app[REGIONS].lanes} == {"regions"}


async def test_a_handle_of_the_daemon_itself_is_refused(machine, monkeypatch):
    monkeypatch.undo()
    async with daemon_of(machine) as (daemon, process):
        answer = await asyncio.to_thread(Engine(machine).offer, daemon)
        assert answer["type"] == "urn:kvtcd:error:same-process"
        assert not process.calls


async def test_the_threads_of_regions_are_watched_and_shown(machine):
    async with daemon_of(machine) as (daemon, _):
        names = {worker.name for worker in daemon.toy.service._workers()}
        assert {"regions", "device-regions"} <= names
        text = daemon.toy.service.metrics_text().decode()
        assert 'kvtcd_lane_pending{lane="device-regions"} 0.0' in text
        assert 'kvtcd_regions{kind="host"} 0.0' in text


async def test_an_unexpected_failure_ends_one_connection_and_is_logged(machine, monkeypatch, caplog):
    async with daemon_of(machine) as (daemon, _):
        monkeypatch.setattr(Imports, "open", lambda *_: 1 // 0)
        engine = Engine(machine)
        assert await asyncio.to_thread(engine.offer, daemon) == {}
        assert "unexpected failure while memory of a GPU was opened" in caplog.text
        assert not daemon.app[REGIONS].nbytes
