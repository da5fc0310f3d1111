"""Blocks in use here that the store turns out not to have: they are offered again, from disk.

The store may have lost them, or the queue may have been full when they were packed. Nobody waits for this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from kvtcd.core.errors import Corrupt, RemoteFailed, StoreFailed
from kvtcd.core.keys import RecordKey, log_name
from kvtcd.core.remote.presence import Presence
from kvtcd.engine import steps
from kvtcd.engine.lanes import Lane
from kvtcd.engine.namespaces import Namespace, Registry, Tenant
from kvtcd.engine.steps import Origin, Record

AGAIN_S = 30.0
"""Seconds in which the same block is looked after once."""
MOST, TOGETHER = 4096, 64
"""Blocks that wait to be looked after, and those of one look."""
_log = logging.getLogger(__name__)


class Reminders:
    """Looks after blocks that were read or put again. All methods belong to the loop.

    Args:
        registry: of tenants.
        lane: on which records are read and checked.
        absent: returns which of some blocks the store does not have, or raises RemoteFailed.
        offer: takes a record that the store does not have.
    """

    def __init__(
        self, registry: Registry, lane: Lane,
        absent: Callable[[Namespace, Sequence[RecordKey]], Awaitable[list[RecordKey]]],
        offer: Callable[[RecordKey, Record, Origin, Tenant], None],
    ) -> None:  # fmt: skip
        self._registry, self._lane, self._absent, self._offer = registry, lane, absent, offer
        self._waiting: OrderedDict[RecordKey, Namespace] = OrderedDict()
        self._seen = Presence(time.monotonic, present_s=AGAIN_S, absent_s=AGAIN_S, capacity=4 * MOST)
        self._woken = asyncio.Event()

    def remind(self, namespace: Namespace, key: RecordKey) -> None:
        """Have a block looked after that lies on disk here, unless it was a moment ago or too many wait."""
        if len(self._waiting) < MOST and self._seen.ask(key.hex()) is None:
            self._seen.note(key.hex(), there=True)
            self._waiting[key] = namespace
            self._woken.set()

    async def run(self) -> None:
        """Look after them, without end."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._waiting:
                namespace = next(iter(self._waiting.values()))
                keys = [key for key, one in self._waiting.items() if one is namespace][:TOGETHER]
                for key in keys:
                    del self._waiting[key]
                try:
                    for key in await self._absent(namespace, keys):
                        await self._read(namespace, key)
                except RemoteFailed as error:
                    _log.debug("%d blocks were not looked for in the remote store: %s", len(keys), error)

    async def _read(self, namespace: Namespace, key: RecordKey) -> None:
        tenant = self._registry.tenants[namespace.tenant]
        if tenant.writer is None or not self._registry.admits(namespace):
            return
        environment = tenant.writer.environment

        def checked() -> tuple[Record, Origin] | None:
            found = environment.read(key, lambda nbytes: np.empty(nbytes, np.uint8))
            if found is None:
                return None
            record = Record(*found)
            return record, Origin.of(namespace, steps.verify(record, key, tenant))

        try:
            found = await self._lane.run(checked)
        except (Corrupt, StoreFailed) as error:  # whoever asks for it finds out, and has it removed
            _log.debug("record %s was not offered to the remote store: %s", log_name(key), error)
        else:
            if found:
                self._offer(key, *found, tenant)
