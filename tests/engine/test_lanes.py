"""Lanes: order, names, and calls that outlive their callers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
from support.patience import PATIENCE_S

from kvtcd.engine.lanes import Lane, on_threads
from kvtcd.engine.streams import occurred

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
    first = asyncio.create_task(lane.run(gate.wait, PATIENCE_S))
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


async def test_a_call_follows_its_event_and_takes_what_it_yields() -> None:
    lane, event, seen = Lane("test"), Future(), []
    last = lane.submit(lambda value: value + 1, event)
    other = lane.submit(seen.append, occurred(3))
    await asyncio.sleep(0.01)
    waiting = last.done(), other.done(), lane.pending
    event.set_result(41)
    result = await asyncio.wrap_future(last)
    await lane.close()

    assert waiting == (False, False, 2), "order within a stream: what comes second waits too"
    assert (result, seen) == (42, [3])


async def test_an_event_that_failed_ends_what_follows_it_unrun_in_the_same_error() -> None:
    one, two, seen = Lane("one"), Lane("two"), []
    failed = one.submit(lambda _: 1 / 0, occurred(None))
    behind = two.submit(seen.append, failed)
    fine = two.submit(lambda value: value, occurred("fine"))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(behind)
    neighbour = await asyncio.wrap_future(fine)
    for lane in (one, two):
        await lane.close()

    assert (neighbour, seen) == ("fine", [])


async def test_the_stages_of_a_host_run_on_five_threads() -> None:
    stages = on_threads()
    names = [stream.name for stream in stages.streams()]
    for stream in stages.streams():
        await stream.close()

    assert names == ["read", "inflate", "synthesize", "analyze", "deflate"]
    assert stages.check.stream is stages.inflate.stream
    assert stages.seal.name == "seal"
