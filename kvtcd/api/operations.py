"""Work that goes on after its request was answered."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from kvtcd.core.errors import Busy, KvtcdError, NotFound
from kvtcd.core.messages import BlockResult
from kvtcd.core.operation import Operation, OperationState

_log = logging.getLogger(__name__)

Work = Callable[[Callable[[], None]], Coroutine[Any, Any, Sequence[BlockResult]]]
"""Is told what to call after each block; returns a result for each."""


class Operations:
    """A bounded table for each tenant. Finished operations are forgotten, oldest first, to make room.

    Args:
        limit: operations of one tenant.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tables: dict[str, dict[str, Operation]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, tenant: str, total: int, work: Work) -> Operation:
        """Begin an operation on `total` blocks.

        Raises:
            Busy: `limit` operations of this tenant are running.
        """
        table = self._tables.setdefault(tenant, {})
        if len(table) >= self._limit:
            oldest = next((id_ for id_, operation in table.items() if operation.state != "running"), None)
            if oldest is None:
                raise Busy("the operations table")
            del table[oldest]
        operation = Operation(secrets.token_hex(16), "running", total)
        table[operation.id] = operation
        task = asyncio.get_running_loop().create_task(self._run(table, operation.id, work))
        self._tasks[operation.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(operation.id))
        return operation

    def find(self, tenant: str, operation_id: str) -> Operation:
        """Return an operation as it is now.

        Raises:
            NotFound: this tenant has none of that id, or it was forgotten.
        """
        operation = self._tables.get(tenant, {}).get(operation_id)
        if operation is None:
            raise NotFound("operation")
        return operation

    async def cancel(self, tenant: str, operation_id: str) -> Operation:
        """End an operation that runs; return it as it is then. What it has done stays done.

        Raises:
            NotFound: this tenant has none of that id, or it was forgotten.
        """
        if self.find(tenant, operation_id).state == "running":
            task = self._tasks[operation_id]
            task.cancel()
            await asyncio.wait([task])
            table = self._tables[tenant]
            if table[operation_id].state == "running":
                table[operation_id] = replace(table[operation_id], state="cancelled")
        return self.find(tenant, operation_id)

    async def close(self) -> None:
        """End what still runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, table: dict[str, Operation], operation_id: str, work: Work) -> None:
        def progress() -> None:
            table[operation_id] = replace(table[operation_id], done=table[operation_id].done + 1)

        def ended(state: OperationState, **changes: Any) -> None:  # noqa: ANN401 - fields of an operation
            table[operation_id] = replace(table[operation_id], state=state, **changes)

        try:
            results = await work(progress)
        except KvtcdError as error:
            ended("failed", detail=error.told)
        except Exception:  # noqa: BLE001 - logged here, shown to the client as a failed operation
            _log.exception("unexpected error in an operation")
            ended("failed", detail="unexpected error")
        else:
            ended("done", results=tuple(results))
