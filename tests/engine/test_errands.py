"""Work in the background ends without its caller, and its failures are seen."""

from __future__ import annotations

import asyncio

import pytest

from kvtcd.core.errors import StoreFailed
from kvtcd.engine.errands import Errands
from kvtcd.engine.metrics import Metrics

pytestmark = pytest.mark.asyncio


async def fail(error: Exception) -> None:
    raise error


async def test_work_is_finished_although_its_caller_has_gone() -> None:
    errands, gate, done = Errands(Metrics()), asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        done.append(1)

    caller = asyncio.create_task(errands.finish("purge", work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    gate.set()
    await errands.ended()

    assert done == [1]


async def test_only_failures_that_nobody_expects_are_counted(caplog) -> None:
    metrics = Metrics()
    errands = Errands(metrics)
    with pytest.raises(StoreFailed):
        await errands.finish("purge", fail(StoreFailed("write", "EIO")))
    with pytest.raises(ZeroDivisionError):
        await errands.finish("purge", fail(ZeroDivisionError("bug")))
    _ = errands.start("report", fail(StoreFailed("read", "EIO")))
    _ = errands.start("tick", asyncio.sleep(10))
    next(task for task in asyncio.all_tasks() if task.get_name() == "kvtcd-tick").cancel()
    await errands.ended()
    text = metrics.text().decode()

    assert 'kvtcd_internal_errors_total{where="purge"} 1.0' in text
    assert 'kvtcd_internal_errors_total{where="report"} 1.0' in text
    assert 'kvtcd_internal_errors_total{where="tick"} 0.0' in text
    assert "purge was not completed: disk write failed: EIO" in caplog.text
    assert "ZeroDivisionError" in caplog.text
