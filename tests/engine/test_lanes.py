"""Lanes: order, names, and calls that outlive their callers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtcd.engine.lanes import Lane

pytestmark = pytest.mark.asyncio


async def test_calls_run_in_order_on_a_thread_with_the_lanes_name() -> None:
    lane, seen = Lane("test"), []

    def call(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(lane.run(call, n) for n in range(20)))
    await lane.close()

    assert seen == list(range(20))
    assert {name.rsplit("_", 1)[0] for name in names} == {"kvtcd-test"}
    assert lane.pending == 0


async def test_a_cancelled_caller_does_not_stop_its_call() -> None:
    lane, gate, done = Lane("test"), threading.Event(), []
    first = asyncio.create_task(lane.run(gate.wait, 10))
    second = asyncio.create_task(lane.run(done.append, 1))
    await asyncio.sleep(0.01)
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    pending = lane.pending
    gate.set()
    await lane.close()

    assert (pending, done) == (2, [1])


async def test_an_error_reaches_the_caller() -> None:
    lane = Lane("test")
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 / 0)
    await lane.close()
