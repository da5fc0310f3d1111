"""Overlap, order, bounds, failure and cancellation, the same on threads and on CUDA streams."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from itertools import pairwise

import pytest
from support import fake_cuda
from support.patience import PATIENCE_S
from support.pipelines import KINDS, Slot, stages

from kvtcd.engine.pipeline import Pipeline

pytestmark = [pytest.mark.asyncio, pytest.mark.parametrize("kind", KINDS)]


@pytest.fixture(autouse=True)
def _device(kind, monkeypatch) -> None:
    if kind == "stand-in":
        fake_cuda.install(monkeypatch)


async def test_neighbours_overlap_in_every_pair_of_stages(kind) -> None:
    """Each stage of a block meets the stage before it of the next block; without overlap nobody comes."""
    blocks, meetings = 6, {}
    for stage in range(2):
        for block in range(blocks - 1):
            meetings[stage, block] = threading.Barrier(2, timeout=PATIENCE_S)

    def work(stage: int, block: int) -> None:
        if (stage - 1, block) in meetings:
            meetings[stage - 1, block].wait()
        if (stage, block - 1) in meetings:
            meetings[stage, block - 1].wait()

    async with stages(kind, "a", "b", "c") as (a, b, c):
        pipeline = Pipeline("test", [Slot() for _ in range(3)])

        async def one(block: int) -> None:
            async with pipeline.enter() as flight:
                first = flight.begin(a, lambda: work(0, block))
                await first.then(b, lambda _: work(1, block)).then(c, lambda _: work(2, block)).end()

        await asyncio.gather(*(one(block) for block in range(blocks)))


async def test_every_stage_keeps_the_order_of_the_blocks(kind) -> None:
    spans, rng = [], random.Random(1)
    pauses = [[rng.choice((0, 0.001, 0.004)) for _ in range(3)] for _ in range(20)]
    async with stages(kind, "a", "b", "c") as (a, b, c):
        pipeline = Pipeline("test", [Slot() for _ in range(3)], [spans.append])

        async def one(pause) -> None:
            async with pipeline.enter() as flight:
                first = flight.begin(a, lambda: time.sleep(pause[0]))
                second = first.then(b, lambda _: time.sleep(pause[1]))
                await second.then(c, lambda _: time.sleep(pause[2])).end()

        await asyncio.gather(*(one(pause) for pause in pauses))

    for name in "abc":
        row = sorted((span for span in spans if span.stage == name), key=lambda span: span.begin)
        assert [span.block for span in row] == list(range(20))
        assert all(left.end <= right.begin for left, right in pairwise(row))
    # When a device began is not known, but only when somebody noticed that it had ended what was before.
    for block in range(20) if kind == "threads" else ():
        way = sorted((span for span in spans if span.block == block), key=lambda span: span.begin)
        assert [span.stage for span in way] == ["a", "b", "c"]
        assert all(left.end <= right.begin for left, right in pairwise(way))


async def test_no_more_blocks_are_in_flight_than_there_are_slots(kind) -> None:
    gate, begun, slots = threading.Event(), [], [Slot(), Slot()]
    async with stages(kind, "a", "b") as (a, b):
        pipeline = Pipeline("test", slots)

        async def one(block: int) -> None:
            async with pipeline.enter() as flight:
                begun.append(block)
                flight.slot.use(block)
                first = flight.begin(a, lambda: gate.wait(PATIENCE_S))
                await first.then(b, lambda _: flight.slot.use(block)).end()

        tasks = [asyncio.create_task(one(block)) for block in range(10)]
        await asyncio.sleep(0.02)
        held = list(begun), a.stream.pending, b.stream.pending
        gate.set()
        await asyncio.gather(*tasks)

    assert held == ([0, 1], 2, 2)
    assert begun == list(range(10))
    assert [slot.clashes for slot in slots] == [[], []]


async def test_a_block_that_fails_leaves_its_neighbours_alone(kind) -> None:
    later = []

    def work(block: int) -> int:
        if block % 3 == 1:
            raise ZeroDivisionError(block)
        return block

    async with stages(kind, "a", "b") as (a, b):
        pipeline = Pipeline("test", [Slot(), Slot()])

        async def one(block: int) -> int:
            async with pipeline.enter() as flight:
                first = flight.begin(a, lambda: work(block))
                return await first.then(b, lambda value: later.append(value) or value * 10).end()

        results = await asyncio.gather(*(one(block) for block in range(9)), return_exceptions=True)

    assert [r if isinstance(r, int) else (type(r), r.args) for r in results] == [
        block * 10 if block % 3 != 1 else (ZeroDivisionError, (block,)) for block in range(9)
    ]
    assert later == [block for block in range(9) if block % 3 != 1]


async def test_a_cancelled_block_leaves_when_nothing_runs_and_does_not_go_on(kind) -> None:
    running, gate, done = threading.Event(), threading.Event(), []

    def first() -> None:
        running.set()
        gate.wait(PATIENCE_S)
        done.append("first")

    async with stages(kind, "a", "b") as (a, b):
        slot = Slot()
        pipeline = Pipeline("test", [slot])

        async def doomed() -> None:
            async with pipeline.enter() as flight:
                flight.slot.use("doomed")
                await flight.begin(a, first).then(b, lambda _: done.append("second")).end()

        async def neighbour() -> int:
            async with pipeline.enter() as flight:
                flight.slot.use("neighbour")
                return await flight.begin(a, lambda: 1).then(b, lambda value: value + 1).end()

        tasks = [asyncio.create_task(doomed()), asyncio.create_task(neighbour())]
        await asyncio.to_thread(running.wait, PATIENCE_S)
        for _ in range(2):  # the second time while it already waits for the stage to end
            tasks[0].cancel()
            await asyncio.sleep(0.01)
        held = tasks[0].done(), slot.owner
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert held == (False, "doomed"), "the slot is not given away while a stage runs in it"
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] == 2
    assert done == ["first"]
    assert slot.clashes == []


async def test_who_is_cancelled_while_waiting_for_a_slot_takes_none(kind) -> None:
    gate = threading.Event()
    async with stages(kind, "a") as (a,):
        pipeline = Pipeline("test", [Slot()])

        async def one(call) -> object:
            async with pipeline.enter() as flight:
                return await flight.begin(a, call).end()

        tasks = [asyncio.create_task(one(lambda: gate.wait(PATIENCE_S))) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert [task.cancelled() for task in tasks] == [False, True, False]
        assert await one(lambda: "free") == "free"


async def test_leaving_early_waits_for_what_runs(kind) -> None:
    running, gate, done = threading.Event(), threading.Event(), []
    async with stages(kind, "a") as (a,):
        pipeline = Pipeline("test", [Slot()])

        async def one() -> None:
            async with pipeline.enter() as flight:
                flight.begin(a, lambda: (running.set(), gate.wait(PATIENCE_S), done.append(1)))
                await asyncio.to_thread(running.wait, PATIENCE_S)
                asyncio.get_running_loop().call_later(0.01, gate.set)
                raise KeyError

        with pytest.raises(KeyError):
            await one()
        assert done == [1]


async def test_nobody_is_told_anything_when_nobody_listens(kind) -> None:
    async with stages(kind, "a") as (a,):
        assert Pipeline("test", [Slot()]).watch("a", 0) is None
        spans = []
        pipeline = Pipeline("test", [Slot()], [spans.append])
        async with pipeline.enter() as flight:
            await flight.begin(a, lambda: time.sleep(0.01)).end()
            pipeline.watch("later", flight.number)(1.0, 2.5)
        assert a.stream.pending == 0

    first, later = spans
    assert (first.pipeline, first.stage, first.block) == ("test", "a", 0)
    assert first.thread.startswith("kvtcd-a")
    assert 0.01 <= first.end - first.begin < PATIENCE_S
    assert (later.stage, later.thread, later.begin, later.end) == ("later", "MainThread", 1.0, 2.5)


async def test_random_failures_and_departures_never_mix_blocks_up(kind) -> None:
    rng, slots = random.Random(7), [Slot() for _ in range(3)]
    async with stages(kind, "a", "b", "c") as (a, b, c):
        pipeline = Pipeline("test", slots)

        def work(slot: Slot, block: int, value: int, how: float) -> int:
            slot.use(block)
            time.sleep(how / 500)
            if how < 0.1:
                raise ValueError(block)
            return value + block

        hows = [[rng.random() for _ in range(3)] for _ in range(120)]
        leaves = [rng.random() / 500 if rng.random() < 0.3 else None for _ in range(120)]

        async def one(block: int) -> int:
            how = hows[block]
            async with pipeline.enter() as flight:
                slot = flight.slot
                first = flight.begin(a, lambda: work(slot, block, 0, how[0]))
                second = first.then(b, lambda value: work(slot, block, value, how[1]))
                return await second.then(c, lambda value: work(slot, block, value, how[2])).end()

        tasks = [asyncio.create_task(one(block)) for block in range(120)]
        for task, leave in zip(tasks, leaves, strict=True):
            if leave is not None:
                await asyncio.sleep(leave)
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert sum(isinstance(result, int) for result in results) > 40
    for block, (how, leave, result) in enumerate(zip(hows, leaves, results, strict=True)):
        if isinstance(result, asyncio.CancelledError):
            assert leave is not None
        elif isinstance(result, ValueError):
            assert (result.args, min(how) < 0.1) == ((block,), True)
        else:
            assert (result, min(how) >= 0.1) == (3 * block, True)
    assert all(slot.owner is None and not slot.clashes for slot in slots)
