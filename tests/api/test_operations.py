"""The table of operations: bounded, per tenant, and honest about failures."""

from __future__ import annotations

import asyncio

import pytest
from support.http import until

from kvtcd.api.operations import Operations
from kvtcd.core.errors import Busy, DeadlineExceeded, NotFound
from kvtcd.core.keys import EngineKey
from kvtcd.core.messages import BlockResult

pytestmark = pytest.mark.asyncio
RESULTS = (BlockResult(EngineKey(b"k"), "stored"),)


async def finished(operations: Operations, tenant: str, id_: str):
    await until(lambda: operations.find(tenant, id_).state != "running")
    return operations.find(tenant, id_)


async def succeed(_progress):
    return RESULTS


async def test_results_are_there_when_it_is_done():
    operations = Operations(limit=4)
    begun = operations.start("a", 1, succeed)
    assert (begun.state, begun.total, begun.done, begun.results) == ("running", 1, 0, ())
    done = await finished(operations, "a", begun.id)
    assert (done.state, done.results, done.detail) == ("done", RESULTS, None)


async def test_other_tenants_see_nothing_of_it():
    operations = Operations(limit=4)
    begun = operations.start("a", 1, succeed)
    with pytest.raises(NotFound):
        operations.find("b", begun.id)


async def test_known_failures_are_told_and_unknown_ones_logged(caplog):
    async def late(_progress):
        raise DeadlineExceeded("demote", 3)

    async def broken(_progress):
        raise ZeroDivisionError("secret")

    operations = Operations(limit=4)
    known = await finished(operations, "a", operations.start("a", 1, late).id)
    unknown = await finished(operations, "a", operations.start("a", 1, broken).id)

    assert (known.state, known.detail) == ("failed", "demote did not end within 3 s")
    assert (unknown.state, unknown.detail) == ("failed", "unexpected error")
    assert "ZeroDivisionError" in caplog.text


async def test_finished_ones_make_room_and_running_ones_do_not():
    release = asyncio.Event()

    async def wait(_progress):
        await release.wait()
        return RESULTS

    operations = Operations(limit=2)
    first = operations.start("a", 1, succeed)
    await finished(operations, "a", first.id)
    operations.start("a", 1, wait)
    operations.start("a", 1, wait)  # forgets the first
    with pytest.raises(NotFound):
        operations.find("a", first.id)
    with pytest.raises(Busy):
        operations.start("a", 1, wait)
    operations.start("b", 1, succeed)
    await operations.close()


async def test_close_ends_what_runs():
    ended = asyncio.Event()

    async def forever(_progress):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return RESULTS

    operations = Operations(limit=2)
    operations.start("a", 1, forever)
    await asyncio.sleep(0)
    await operations.close()
    assert ended.is_set()


async def test_how_far_it_is_shows_while_it_runs():
    steps = [asyncio.Event() for _ in range(3)]

    async def work(progress):
        for step in steps:
            await step.wait()
            progress()
        return RESULTS * 3

    operations = Operations(limit=2)
    begun = operations.start("a", 3, work)
    for number, step in enumerate(steps):
        now = operations.find("a", begun.id)
        assert (now.state, now.done, now.total) == ("running", number, 3)
        step.set()
        await until(lambda number=number: operations.find("a", begun.id).done == number + 1)
    assert (await finished(operations, "a", begun.id)).results == RESULTS * 3


async def test_a_cancelled_one_ends_and_says_how_far_it_came():
    ended = asyncio.Event()

    async def work(progress):
        progress()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return RESULTS

    operations = Operations(limit=2)
    begun = operations.start("a", 5, work)
    await until(lambda: operations.find("a", begun.id).done == 1)
    with pytest.raises(NotFound):
        await operations.cancel("b", begun.id)
    cancelled = await operations.cancel("a", begun.id)
    assert (cancelled.state, cancelled.done, cancelled.total) == ("cancelled", 1, 5)
    assert ended.is_set()
    assert await operations.cancel("a", begun.id) == cancelled
    at_once = operations.start("a", 5, work)
    assert (await operations.cancel("a", at_once.id)).state == "cancelled", "before it has begun"
    done = await finished(operations, "a", operations.start("a", 1, succeed).id)
    assert await operations.cancel("a", done.id) == done, "what is done stays done"
