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


async def succeed():
    return RESULTS


async def test_results_are_there_when_it_is_done():
    operations = Operations(limit=4)
    begun = operations.start("a", succeed)
    assert (begun.state, begun.results) == ("running", ())
    done = await finished(operations, "a", begun.id)
    assert (done.state, done.results, done.detail) == ("done", RESULTS, None)


async def test_other_tenants_see_nothing_of_it():
    operations = Operations(limit=4)
    begun = operations.start("a", succeed)
    with pytest.raises(NotFound):
        operations.find("b", begun.id)


async def test_known_failures_are_told_and_unknown_ones_logged(caplog):
    async def late():
        raise DeadlineExceeded("demote", 3)

    async def broken():
        raise ZeroDivisionError("secret")

    operations = Operations(limit=4)
    known = await finished(operations, "a", operations.start("a", late).id)
    unknown = await finished(operations, "a", operations.start("a", broken).id)

    assert (known.state, known.detail) == ("failed", "demote did not end within 3 s")
    assert (unknown.state, unknown.detail) == ("failed", "unexpected error")
    assert "ZeroDivisionError" in caplog.text


async def test_finished_ones_make_room_and_running_ones_do_not():
    release = asyncio.Event()

    async def wait():
        await release.wait()
        return RESULTS

    operations = Operations(limit=2)
    first = operations.start("a", succeed)
    await finished(operations, "a", first.id)
    operations.start("a", wait)
    operations.start("a", wait)  # forgets the first
    with pytest.raises(NotFound):
        operations.find("a", first.id)
    with pytest.raises(Busy):
        operations.start("a", wait)
    operations.start("b", succeed)
    await operations.close()


async def test_close_ends_what_runs():
    ended = asyncio.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return RESULTS

    operations = Operations(limit=2)
    operations.start("a", forever)
    await asyncio.sleep(0)
    await operations.close()
    assert ended.is_set()
