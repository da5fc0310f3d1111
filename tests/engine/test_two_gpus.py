"""Blocks on two GPUs: each has a lane and room of its own, and policies say which is whose."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from support import fake_cuda
from support.invariants import check
from support.patience import PATIENCE_S
from support.stored import fetch, key, store_each
from support.toy import BLOCK_BYTES, IDENTITY, block, soon, toy_service
from support.twin_memory import TwinMemory

from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.errors import Busy, NotFound
from kvtcd.core.events import Move, Moved
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import Evict, HostTier, Match, Policy, Promote
from kvtcd.engine.cuda import copies_on_each
from kvtcd.engine.lanes import on_threads
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.mover import DEPTH, Mover
from kvtcd.engine.streams import Gpu
from kvtcd.tiers.device import DeviceMemory
from kvtcd.tiers.disk import Put, footprint
from kvtcd.tiers.memory import GRANULE, HostMemory

pytestmark = pytest.mark.asyncio
TENANT = "uid:1"
ONE, TWO = "cuda:0", "cuda:1"


class Watched(DeviceMemory):
    """Notes on which device's stream each copy was launched; copies only when the device comes to it."""

    def __init__(self, name: str, blocks: int) -> None:
        super().__init__(blocks * GRANULE, torch.device("cpu"), TwinMemory().tensor)
        self.name, self.gate = name, threading.Event()
        self.gate.set()
        self.launched: list[torch.device] = []

    def _later(self, copy, key, pieces) -> None:
        self.launched.append(fake_cuda.here())
        fake_cuda.launch(lambda: (self.gate.wait(PATIENCE_S), copy(key, pieces)))

    def upload(self, key, pieces) -> None:
        self._later(super().upload, key, pieces)

    def download(self, key, pieces) -> None:
        self._later(super().download, key, pieces)


async def test_two_gpus_copy_at_the_same_time_each_on_a_stream_of_its_own(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    devices = {ONE: torch.device("cuda", 0), TWO: torch.device("cuda", 1)}
    copies = copies_on_each(devices)
    memories = {name: Watched(name, 2 * DEPTH) for name in devices}
    host, stages = HostMemory(4 * DEPTH * GRANULE), on_threads()
    mover = Mover(
        memory=host, put_record=Put, stages=stages, scratch=HeapScratch, metrics=Metrics(),
        footprint=footprint, gpus={name: Gpu(memories[name], copies[name]) for name in devices},
    )  # fmt: skip

    def lift(number: int, device: str) -> asyncio.Task:
        record = RecordKey(bytes([number]) * 32)
        host.allocate(record, GRANULE)
        host.pieces(record)[0][:] = number
        memories[device].allocate(record, GRANULE)
        move = Move(record, Place.HOST, Place.GPU, 0, device=device)
        return asyncio.create_task(mover.move(move, None, None, None))

    memories[ONE].gate.clear()
    slow = [lift(number, ONE) for number in range(2 * DEPTH)]
    async with asyncio.timeout(PATIENCE_S):
        quick = [await lift(number, TWO) for number in range(100, 100 + DEPTH)]
    waited = [task.done() for task in slow]
    memories[ONE].gate.set()
    for task in slow:
        await task
    for device, number in ((ONE, 1), (TWO, 101)):
        record = RecordKey(bytes([number]) * 32)
        host.pieces(record)[0][:] = 0
        await mover.move(Move(record, Place.GPU, Place.HOST, 0, device=device), None, None, None)
        assert np.all(host.pieces(record)[0] == number)
    for stream in (*stages.streams(), *(copy.stream for copy in copies.values())):
        await stream.close()

    assert all(isinstance(outcome.event, Moved) for outcome in quick)
    assert waited == [False] * 2 * DEPTH, "one of them stood still meanwhile"
    assert memories[ONE].launched == [devices[ONE]] * (2 * DEPTH + 1)
    assert memories[TWO].launched == [devices[TWO]] * (DEPTH + 1)


def at_home(first: str, second: str) -> tuple[Policy, ...]:
    """Return policies of two namespaces that are lifted when they are asked for."""
    own = {"host": HostTier("raw", high=0.9, low=0.7), "evict": Evict("lru")}
    return (
        Policy("first", Match(namespace="n"), promote=Promote(first), **own),
        Policy("second", Match(namespace="m"), promote=Promote(second), **own),
        Policy("rest", **own),
    )


async def spaces(toy):
    service = toy.service
    return [
        await service.register(TENANT, "n", IDENTITY),
        await service.register(TENANT, "m", replace(IDENTITY, parallel="tp2-rank1")),
    ]


def on_gpus(toy) -> dict[str, Counter[int]]:
    """Return how many blocks of each namespace the memory of each device has."""
    entries = toy.catalog.residents.entries
    return {name: Counter(entries[key].namespace for key in each._blocks) for name, each in toy.gpus.items()}


async def test_each_namespace_is_lifted_to_its_gpu_within_what_that_has(tmp_path) -> None:
    async with toy_service(tmp_path, gpu={ONE: 2 * BLOCK_BYTES, TWO: 3 * BLOCK_BYTES}) as toy:
        await toy.service.reload(at_home("gpu", TWO))
        first, second = await spaces(toy)
        for number in range(5):
            for ns in (first, second):
                await store_each(toy.service, ns, number)
                results = await toy.service.blocks.prefetch(ns, [key(number)], b"", soon(), tier=Tier.GPU)
                assert [result.outcome for result in results] == ["stored"]
        stats = toy.service.overview.stats(TENANT).tiers["gpu"]
        text = toy.service.metrics_text().decode()
        found = on_gpus(toy)

    assert found == {ONE: {first.number: 2}, TWO: {second.number: 3}}
    assert (stats.capacity, stats.used) == (5 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    assert {name: (each.capacity, each.used, each.blocks) for name, each in stats.devices.items()} == {
        ONE: (2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 2), TWO: (3 * BLOCK_BYTES, 3 * BLOCK_BYTES, 3),
    }  # fmt: skip
    assert f'kvtcd_used_bytes{{device="cuda:1",tier="gpu"}} {3.0 * BLOCK_BYTES}' in text
    assert f'kvtcd_capacity_bytes{{device="cuda:0",tier="gpu"}} {2.0 * BLOCK_BYTES}' in text
    assert 'kvtcd_tier_blocks{tier="gpu"} 5.0' in text


async def test_a_gpu_that_a_reload_names_for_the_first_time_is_said_and_its_blocks_stay(
    tmp_path, caplog
) -> None:
    async with toy_service(tmp_path, gpu={ONE: 2 * BLOCK_BYTES}) as toy:
        service = toy.service
        await service.reload(at_home("gpu", "gpu"))
        first, _ = await spaces(toy)
        await store_each(service, first, 0)
        await service.blocks.prefetch(first, [key(0)], b"", soon(), tier=Tier.GPU)
        assert (service.overview.stats(TENANT).degraded, len(toy.gpus[ONE]._blocks)) == ({}, 1)
        with caplog.at_level(logging.WARNING):
            await service.reload(at_home("cuda:5", "gpu"))
        told = [record.getMessage() for record in caplog.records]
        degraded, left = service.overview.stats(TENANT).degraded, dict(toy.gpus[ONE]._blocks)
        results = await service.blocks.prefetch(first, [key(0)], b"", soon(), tier=Tier.GPU)
        body = await fetch(service, first, 0)
        await service.reload(at_home("gpu", "gpu"))
        again = service.overview.stats(TENANT).degraded

    assert len(told) == 1
    assert "policy first" in told[0]
    assert "cuda:5" in told[0]
    assert (degraded, left, again) == ({"unknown-gpu": 1}, {}, {})
    assert [result.reason for result in results] == ["no-tier"]
    assert body == block(0)


@pytest.mark.parametrize("kind", ["threads", "stand-in"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_go_on_while_homes_change(tmp_path, monkeypatch, kind, seed) -> None:
    """Right bytes, or a miss that loss explains; in the end each GPU has what the catalog says."""
    if kind == "stand-in":
        fake_cuda.install(monkeypatch)
        for name in ("upload", "download"):
            copy = getattr(DeviceMemory, name)
            late = functools.partialmethod(
                lambda self, key, pieces, copy: fake_cuda.launch(lambda: copy(self, key, pieces)), copy=copy
            )
            monkeypatch.setattr(DeviceMemory, name, late)
    async with toy_service(
        tmp_path, host=12 * BLOCK_BYTES, disk=60 * BLOCK_BYTES, kind=kind,
        gpu={ONE: 3 * BLOCK_BYTES, TWO: 4 * BLOCK_BYTES},
    ) as toy:  # fmt: skip
        service, rng = toy.service, random.Random(seed)
        await service.reload(at_home("gpu", TWO))
        both, hits, lifted = await spaces(toy), Counter(), Counter()

        def seen() -> bool:
            return lifted["stored"] > 10 and all(hits[ns.name] > 10 for ns in both)

        async def client(own: random.Random) -> None:
            for calls in count():
                if calls >= 40 and seen():
                    return
                ns, number, choice = own.choice(both), own.randrange(20), own.random()
                if choice < 0.3:
                    await store_each(service, ns, number)
                elif choice < 0.7:
                    try:
                        assert await fetch(service, ns, number) == block(number)
                        hits[ns.name] += 1
                    except (NotFound, Busy):
                        pass
                else:
                    (result,) = await service.blocks.prefetch(ns, [key(number)], b"", soon(), tier=Tier.GPU)
                    lifted[result.outcome] += 1

        async def operator(own: random.Random) -> None:
            while not done.is_set():
                await service.reload(at_home(own.choice([ONE, TWO, "gpu", "cuda:9"]), own.choice([ONE, TWO])))
                await asyncio.sleep(0.002)

        done = asyncio.Event()
        changing = asyncio.create_task(operator(random.Random(rng.random())))
        async with asyncio.timeout(2 * PATIENCE_S):
            await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(6)))
        done.set()
        await changing
        await service.reload(at_home(ONE, TWO))
        await service._driver.idle()
        check(toy.catalog)
        found, waiting = on_gpus(toy), service._driver.waiting
        lies = {
            name: {key for key in toy.catalog.residents.gpus.lifted()
                   if toy.catalog.residents.gpus.where(key).device == name}
            for name in toy.gpus
        }  # fmt: skip
        same = {name: set(each._blocks) for name, each in toy.gpus.items()}
        numbers = [ns.number for ns in both]

    assert waiting == 0
    assert same == lies
    assert set(found[ONE]) <= {numbers[0]}
    assert set(found[TWO]) <= {numbers[1]}
