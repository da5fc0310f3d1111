"""Work that goes on after its request was answered."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from kvtcd.core.errors import Busy, KvtcdError, NotFound
from kvtcd.core.messages import BlockResult, Operation

_log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, tuple[BlockResult, ...]]]


class Operations:
    """A bounded table for each tenant. Finished operations are forgotten, oldest first, to make room.

    Args:
        limit: operations of one tenant.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tables: dict[str, dict[str, Operation]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tenant: str, work: Work) -> Operation:
        """Begin an operation.

        Raises:
            Busy: `limit` operations of this tenant are running.
        """
        table = self._tables.setdefault(tenant, {})
        if len(table) >= self._limit:
            oldest = next((id_ for id_, operation in table.items() if operation.state != "running"), None)
            if oldest is None:
                raise Busy("the operations table")
            del table[oldest]
        operation = Operation(secrets.token_hex(16), "running")
        table[operation.id] = operation
        task = asyncio.get_running_loop().create_task(self._run(table, operation.id, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
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

    async def close(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, table: dict[str, Operation], operation_id: str, work: Work) -> None:
        try:
            table[operation_id] = Operation(operation_id, "done", await work())
        except KvtcdError as error:
            table[operation_id] = Operation(operation_id, "failed", detail=str(error))
        except Exception:  # noqa: BLE001 - logged here, shown to the client as a failed operation
            _log.exception("unexpected error in an operation")
            table[operation_id] = Operation(operation_id, "failed", detail="unexpected error")
