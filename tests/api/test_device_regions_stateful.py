"""Regions on a GPU live and die in any order: bytes and bounds are right, nothing is freed while open."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from support.fake_driver import ILLEGAL, Machine, Process
from support.http import unhurried
from support.patience import PATIENCE_S

from kvtcd.api.regions import Regions
from kvtcd.core.device_errors import BadHandle, DeviceFailed
from kvtcd.core.errors import BadRequest, Busy, KvtcdError, NotFound, TooLarge
from kvtcd.core.regions import Span
from kvtcd.cuda.exports import Exported
from kvtcd.cuda.imports import Imports
from kvtcd.engine.metrics import Metrics

SIZE = 1000
LIMITS = unhurried(regions=3, device_region_bytes=2 * SIZE)
TENANTS = st.sampled_from(["a", "b"])
PLACES = st.integers(0, SIZE + 10)


@dataclass(eq=False)
class Engine:
    """A process with one allocation; `data` is what is in it."""

    tenant: str
    process: Process
    memory: int
    data: bytearray = field(default_factory=lambda: bytearray(SIZE))

    def offer(self, begin: int, nbytes: int):
        return Exported(self.process.driver(), self.memory + begin, nbytes).offer()


@dataclass(eq=False)
class Shared:
    """A region that was granted."""

    tenant: str
    engine: Engine
    name: str
    begin: int
    nbytes: int
    idle: bool = False


class Lives(RuleBasedStateMachine):
    """Engines of two tenants, one daemon, one GPU."""

    engines = Bundle("engines")
    shares = Bundle("shares")

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.machine = Machine()
        self.open: list[Shared] = []
        self.start()

    def start(self) -> None:
        self.process, self.failed = Process(self.machine), False
        self.metrics = Metrics()
        self.regions = Regions(LIMITS, self.metrics, Imports(self.process.driver))

    def run(self, awaited):
        return self.loop.run_until_complete(asyncio.wait_for(awaited, PATIENCE_S))

    # What happens ---------------------------------------------------------------------------------------

    @rule(target=engines, tenant=TENANTS)
    def an_engine_starts(self, tenant: str) -> Engine:
        process = Process(self.machine)
        driver = process.driver()
        with driver.current(driver.retain(0)):
            return Engine(tenant, process, driver.allocate(SIZE))

    @rule(target=shares, engine=engines, tenant=TENANTS, begin=PLACES, nbytes=st.integers(1, SIZE))
    def one_offers(
        self, engine: Engine, tenant: str, begin: int, nbytes: int
    ) -> Shared | MultipleResults[Shared]:
        """The engine's own user, or another one who knows its handle."""
        if engine.memory not in engine.process.memory or begin >= SIZE:
            return multiple()
        end = min(begin + nbytes, SIZE)
        offer = engine.offer(begin, end - begin)
        mine = [one for one in self.open if one.tenant == tenant]
        taken = [one for one in self.open if one.engine is engine and one.tenant != tenant]
        if len(mine) >= LIMITS.regions:
            expected: type[KvtcdError] | None = Busy
        elif sum(one.nbytes for one in mine) + offer.nbytes > LIMITS.device_region_bytes:
            expected = TooLarge
        elif self.failed:
            expected = DeviceFailed
        else:
            expected = BadHandle if taken else None
        shared = Shared(tenant, engine, "", begin, offer.nbytes)
        opening = self.regions.open(tenant, offer, lambda: self.drop(shared))
        if expected is not None:
            with pytest.raises(expected):
                self.run(opening)
            return multiple()
        grant = self.run(opening)
        shared.name = grant.region
        self.open.append(shared)
        return shared

    @rule(engine=engines, begin=st.integers(0, 100))
    def one_offers_too_much(self, engine: Engine, begin: int) -> None:
        if engine.memory in engine.process.memory and not self.failed and not self.open:
            offer = engine.offer(0, SIZE)
            wrong = type(offer)(offer.uuid, offer.handle, begin + 1, SIZE, offer.event)
            with pytest.raises(BadRequest, match="offset"):
                self.run(self.regions.open(engine.tenant, wrong, lambda: None))

    def part(self, shared: Shared, place: int, nbytes: int):
        try:
            return self.regions.part(shared.tenant, shared.name, Span(place, nbytes))
        except NotFound:
            assert shared not in self.open
        except BadRequest:
            assert place + nbytes > shared.nbytes
        return None

    @rule(shared=shares, place=PLACES, nbytes=st.integers(1, 400))
    def a_block_is_stored(self, shared: Shared, place: int, nbytes: int) -> None:
        if (part := self.part(shared, place, nbytes)) is None:
            return
        room = np.zeros(nbytes, dtype=np.uint8)
        done: list[bool] = []
        slot = SimpleNamespace(spaces=lambda: [room[:7], room[7:]], filled=lambda: done.append(True))
        self.run(part.fill(slot, PATIENCE_S))
        at = shared.begin + place
        assert room.tobytes() == shared.engine.data[at : at + nbytes]
        assert done

    @rule(shared=shares, place=PLACES, data=st.binary(min_size=1, max_size=400))
    def a_block_is_read(self, shared: Shared, place: int, data: bytes) -> None:
        if (part := self.part(shared, place, len(data))) is None:
            return
        pieces = [memoryview(bytearray(data[:5])), memoryview(bytearray(data[5:]))]
        lease = SimpleNamespace(
            nbytes=len(data), landed=False, pieces=lambda: [piece for piece in pieces if piece]
        )
        self.run(part.take(lease, PATIENCE_S))
        at = shared.begin + place
        shared.engine.data[at : at + len(data)] = data

    @rule(engine=engines, place=st.integers(0, SIZE - 1), data=st.binary(max_size=50))
    def the_model_runs(self, engine: Engine, place: int, data: bytes) -> None:
        if engine.memory in engine.process.memory:
            data = data[: SIZE - place]
            engine.process.set(engine.memory + place, data)
            engine.data[place : place + len(data)] = data

    # How it ends ----------------------------------------------------------------------------------------

    def drop(self, shared: Shared) -> None:
        """End a region, as the side socket does."""
        self.open.remove(shared)
        self.regions.remove(shared.name, lambda: setattr(shared, "idle", True))

    def settled(self, *ending: Shared) -> None:
        """End regions; return when they are let go of."""

        async def end() -> None:
            for shared in ending:
                self.drop(shared)
            while self.regions._closing:
                await asyncio.wait(self.regions._closing)

        self.run(end())

    @rule(shared=consumes(shares))
    def a_connection_ends(self, shared: Shared) -> None:
        if shared in self.open:
            self.settled(shared)
            assert shared.idle

    @rule(engine=engines)
    def an_engine_frees_its_memory_once_nobody_has_it(self, engine: Engine) -> None:
        for shared in [one for one in self.open if one.engine is engine]:
            self.a_connection_ends(shared)
        driver = engine.process.driver()
        if engine.memory in engine.process.memory:
            with driver.current(driver.retain(0)):
                driver.free(engine.memory)

    @rule(engine=engines)
    def an_engine_has_other_memory_then(self, engine: Engine) -> None:
        if engine.memory not in engine.process.memory:
            driver = engine.process.driver()
            with driver.current(driver.retain(0)):
                engine.memory = driver.allocate(SIZE)
            engine.data[:] = bytes(SIZE)

    @rule(engine=consumes(engines))
    def an_engine_is_killed(self, engine: Engine) -> None:
        engine.process.end()
        for shared in [one for one in self.open if one.engine is engine]:
            self.a_connection_ends(shared)

    @rule(engine=engines)
    def the_gpu_fails(self, engine: Engine) -> None:
        mine = [one for one in self.open if one.engine is engine]
        if not mine:
            return
        self.process.script["cuMemcpyDtoHAsync_v2"] = ILLEGAL
        part = self.regions.part(mine[0].tenant, mine[0].name, Span(0, 1))
        slot = SimpleNamespace(spaces=lambda: [np.zeros(1, dtype=np.uint8)])
        with pytest.raises(NotFound):
            self.run(part.fill(slot, PATIENCE_S))
        self.failed = True
        self.settled()
        assert not self.open
        assert self.metrics.registry.get_sample_value("kvtcd_failed_devices_total") == 1
        self.die()

    def die(self) -> None:
        """Forget what is open, as the end of a process does; `failed` stays until there is another."""
        for allocation in self.process.imported:
            allocation.opened_by[self.process] = 0
        self.process.memory.clear()

    @rule()
    def the_daemon_is_started_anew(self) -> None:
        self.settled(*self.open)
        self.run(self.regions.close())
        assert not self.process.imported
        self.die()
        self.start()

    # What holds -----------------------------------------------------------------------------------------

    @invariant()
    def no_rule_of_cuda_is_broken(self) -> None:
        assert self.machine.faults == []

    @invariant()
    def open_is_what_is_shared_and_nothing_else(self) -> None:
        regions = {id(one.engine) for one in self.open}
        assert len(self.process.imported) == len(regions)
        assert self.regions.nbytes == sum(one.nbytes for one in self.open)
        sample = self.metrics.registry.get_sample_value
        assert sample("kvtcd_regions", {"kind": "device"}) == len(self.open)
        assert sample("kvtcd_region_bytes", {"kind": "device"}) == self.regions.nbytes

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.the_daemon_is_started_anew()
            self.run(self.regions.close())
            self.loop.close()
            assert self.machine.faults == []


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
