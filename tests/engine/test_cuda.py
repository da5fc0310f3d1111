"""Launches, marks and the reaper: on a stand-in for the device, and the order of events on a real one."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support import fake_cuda
from support.patience import PATIENCE_S

from kvtcd.core.errors import DeviceLost
from kvtcd.engine.cuda import CudaStream, copies_on_each, on_cuda
from kvtcd.engine.lanes import Lane
from kvtcd.engine.pipeline import Pipeline
from kvtcd.engine.streams import Stage, came, occurred

pytestmark = pytest.mark.asyncio
DEVICE = torch.device("cuda")


async def test_a_chain_is_launched_at_once_and_ends_in_order_on_the_device(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    one, two, gate, log = CudaStream("one", DEVICE), CudaStream("two", DEVICE), threading.Event(), []

    def first(value: int) -> int:
        fake_cuda.launch(lambda: (gate.wait(PATIENCE_S), log.append("first")))
        return value + 1

    def second(value: int) -> int:
        fake_cuda.launch(lambda: log.append("second"))
        return value * 10

    begun = one.submit(first, occurred(1))
    ended = two.submit(second, begun)
    await came(ended.launched)
    assert await asyncio.to_thread(two._stream.waiting.wait, PATIENCE_S), "the device itself waits"
    before = begun.done(), ended.done(), list(log), one.pending, two.pending
    gate.set()
    for event in (begun, ended):  # each stream sees for itself that its own has come
        await came(event)
    after = begun.result(), ended.result(), one.pending, two.pending
    for stream in (one, two):
        await stream.close()

    assert before == (False, False, [], 1, 1)
    assert after == (2, 20, 0, 0)
    assert log == ["first", "second"]


async def test_what_someone_waits_for_goes_before_the_way_down(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority=0: SimpleNamespace(priority=priority))
    streams = [*on_cuda(DEVICE).streams(), copies_on_each({"cuda:0": DEVICE})["cuda:0"].stream]
    own = {each.name: each._stream.priority for each in streams if isinstance(each, CudaStream)}
    for stream in streams:
        await stream.close()

    assert own == {"inflate": -1, "synthesize": -1, "copy": -1, "analyze": 0, "deflate": 0}, (
        "lower goes first"
    )


async def test_a_call_that_fails_behind_a_launch_ends_when_the_device_has_let_go(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    one, two, gate, log = CudaStream("one", DEVICE), CudaStream("two", DEVICE), threading.Event(), []

    def fails(_: None) -> None:
        fake_cuda.launch(lambda: (gate.wait(PATIENCE_S), log.append("late")))
        raise ValueError("half launched")

    failed = one.submit(fails, occurred(None))
    behind = two.submit(log.append, failed)
    fine = one.submit(lambda value: value, occurred("fine"))
    await asyncio.sleep(0.02)
    before = failed.done(), behind.done()
    gate.set()
    for event in (failed, behind, fine):
        await came(event)
    for stream in (one, two):
        await stream.close()

    assert before == (False, False)
    assert isinstance(failed.exception(), ValueError)
    assert behind.exception() is failed.exception()
    assert fine.result() == "fine"
    assert log == ["late"]


async def test_a_device_and_a_thread_wait_for_each_other(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    lane, stream, gate, log = Lane("lane"), CudaStream("one", DEVICE), threading.Event(), []
    read = lane.submit(lambda _: gate.wait(PATIENCE_S) and 1, occurred(None))
    worked = stream.submit(lambda value: fake_cuda.launch(lambda: log.append("device")) or value + 1, read)
    copied = lane.submit(lambda value: log.append("thread") or value + 1, worked)
    gate.set()
    await came(copied)
    for each in (lane, stream):
        await each.close()

    assert (copied.result(), log) == (3, ["device", "thread"])


@pytest.mark.parametrize("call", ["record", "synchronize"])
async def test_a_device_that_is_lost_ends_every_call_and_is_told_of(monkeypatch, call) -> None:
    fake_cuda.install(monkeypatch)
    told, lane = [], Lane("lane")
    one, two = (CudaStream(name, DEVICE, lost=told.append) for name in ("one", "two"))
    fine = one.submit(lambda value: value, occurred("fine"))
    await came(fine)
    fake_cuda.break_down(monkeypatch, call)
    first = one.submit(lambda _: 1, occurred(None))
    chain = lane.submit(lambda value: value, two.submit(lambda value: value, first))
    raising = one.submit(lambda _: 1 / 0, occurred(None))
    for event in (first, chain, raising):
        await came(event)
    for stream in (one, two, lane):
        await stream.close()

    assert fine.result() == "fine"
    assert isinstance(first.exception(), DeviceLost)
    assert isinstance(chain.exception(), DeviceLost)
    assert isinstance(raising.exception(), DeviceLost)
    assert "illegal memory access" in str(told[0])


@pytest.mark.parametrize("kernels", ["", "CUDA error: out of memory"])
async def test_a_device_that_still_answers_is_not_lost(monkeypatch, kernels) -> None:
    fake_cuda.install(monkeypatch)
    told: list[DeviceLost] = []
    stream = CudaStream("one", DEVICE, lost=told.append)
    with monkeypatch.context() as broken:
        fake_cuda.break_down(broken, "synchronize", "CUDA error: invalid argument", kernels)
        failed = stream.submit(lambda _: 1, occurred(None))
        await came(failed)
    fine = stream.submit(lambda _: 2, occurred(None))
    await came(fine)
    await stream.close()

    assert str(failed.exception()) == "CUDA error: invalid argument"
    assert (fine.result(), told) == (2, [])


async def test_without_memory_for_an_event_the_thread_waits_for_the_device(monkeypatch, caplog) -> None:
    fake_cuda.install(monkeypatch)
    told, gate, log = [], threading.Event(), []
    one, two = (CudaStream(name, DEVICE, lost=told.append) for name in ("one", "two"))
    fake_cuda.break_down(monkeypatch, "record", "CUDA error: out of memory", "")

    def launches(_: None) -> str:
        fake_cuda.launch(lambda: (gate.wait(PATIENCE_S), log.append("device")))
        return "value"

    first = one.submit(launches, occurred(None))
    second = two.submit(lambda value: log.append("next") or value, first)
    await asyncio.sleep(0)
    before = first.launched.done()
    gate.set()
    await came(second)
    for stream in (one, two):
        await stream.close()

    assert (before, first.result(), second.result(), told) == (False, "value", "value", [])
    assert log == ["device", "next"]
    assert "no memory for an event" in caplog.text


async def test_nothing_of_the_device_ends_on_the_event_loop(monkeypatch) -> None:
    """Results, marks, and what the frames of an error hold: where they are collected, CUDA is called."""
    fake_cuda.install(monkeypatch)
    ends: dict[str, str] = {}
    numbers = itertools.count()

    class Tensor:
        def __init__(self, name: str) -> None:
            weakref.finalize(self, lambda: ends.update({name: threading.current_thread().name}))

    class Mark(fake_cuda._Event):
        def __init__(self, *, blocking: bool) -> None:
            super().__init__(blocking=blocking)
            weakref.finalize(
                self, lambda: ends.update({f"mark {next(numbers)}": threading.current_thread().name})
            )

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    one, two = CudaStream("one", DEVICE), CudaStream("two", DEVICE)
    stages = Stage("inflate", one), Stage("synthesize", two), Stage("scatter", Lane("lane"))

    def fails(given: Tensor) -> None:
        there = Tensor("local")
        raise ValueError(there is given)

    async def through(ring: Pipeline) -> None:
        async with ring.enter() as flight:
            inflated = flight.begin(stages[0], lambda: Tensor("result"))
            await inflated.then(stages[1], fails).then(stages[2], lambda _: None).end()

    with pytest.raises(ValueError, match="False"):
        await through(Pipeline("up", [SimpleNamespace(clear=lambda: None)]))
    for stage in stages:
        await stage.stream.close()

    assert {"result", "local"} <= ends.keys()
    assert len(ends) == 4
    assert threading.current_thread().name not in ends.values(), ends


async def test_the_times_of_calls_on_one_stream_do_not_overlap(monkeypatch) -> None:
    """They are launched one behind the other at once; the second begins when the first is done."""
    fake_cuda.install(monkeypatch)
    stream, gate, spans = CudaStream("one", DEVICE), threading.Event(), []
    events = [
        stream.submit(
            lambda _: fake_cuda.launch(lambda: gate.wait(PATIENCE_S)),
            occurred(None),
            lambda *span: spans.append(span),
        )
        for _ in range(3)
    ]
    await came(events[-1].launched)
    gate.set()
    await came(events[-1])
    await stream.close()

    assert [left[1] <= right[0] for left, right in pairwise(spans)] == [True, True]


async def test_what_launches_has_a_stream_and_what_reads_its_results_a_thread(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    streams = on_cuda(DEVICE).streams()
    launching = {stream.name for stream in streams if isinstance(stream, CudaStream)}
    names = [stream.name for stream in streams]
    for stream in streams:
        await stream.close()

    assert launching == {"inflate", "synthesize", "analyze", "deflate"}
    assert len(set(names)) == len(names) == 9


async def test_each_gpu_that_holds_blocks_has_a_stream_for_copies(monkeypatch) -> None:
    fake_cuda.install(monkeypatch)
    devices = {f"cuda:{index}": torch.device("cuda", index) for index in (2, 0, 1)}
    copies = copies_on_each(devices)
    found = {
        name: await asyncio.wrap_future(copy.stream.submit(lambda _: fake_cuda.here(), occurred(None)))
        for name, copy in copies.items()
    }
    for copy in copies.values():
        await copy.stream.close()

    assert found == devices
    assert [copy.stream.name for copy in copies.values()] == ["copy", "copy-cuda0", "copy-cuda1"]
    assert {copy.name for copy in copies.values()} == {"copy"}


@pytest.mark.gpu
async def test_events_are_those_of_the_device() -> None:
    one, two = CudaStream("one", DEVICE), CudaStream("two", DEVICE)

    def slow(_: None) -> torch.Tensor:
        torch.cuda._sleep(500_000_000)  # cycles: tenths of a second
        return torch.ones(1 << 20, device=DEVICE)

    begun = one.submit(slow, occurred(None))
    ended = two.submit(lambda ones: ones * 2, begun)
    await came(ended.launched)
    before = begun.done(), ended.done()
    await came(ended)
    total = float(ended.result().sum())
    for stream in (one, two):
        await stream.close()

    assert before == (False, False)
    assert total == 2 << 20
