"""After a clean stop and a start, what was raw in memory comes up again, while requests are served.

A tenant's environment keeps the keys, the one used last first, under a name that no namespace has. They are
hints and nothing more: one that names no block is passed over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from kvtcd.core.events import Prefetch
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.residency import Residents
from kvtcd.engine.driver import Driver, Request
from kvtcd.engine.metrics import Metrics

WARM_NAME = "@warm"
"""Under this name an environment keeps the keys; no namespace may begin with ``@``."""
_MOST = 4096
"""Keys of one tenant, 128 KiB."""
_KEY_BYTES = 32


def hottest(residents: Residents, owned: Callable[[int], bool]) -> bytes:
    """Return the keys of blocks that are raw on the host, the one used last first.

    Args:
        residents: who is where.
        owned: tells which namespaces count, by their numbers.
    """
    copies = [
        e.host for e in residents.entries.values() if e.host and e.ready(Place.HOST) and owned(e.namespace)
    ]
    copies.sort(key=lambda copy: copy.used, reverse=True)
    return b"".join(copy.block.key for copy in copies[:_MOST])


def keys_of(value: bytes) -> list[RecordKey]:
    """Read what `hottest` wrote; a part of a key at the end is no key."""
    ends = range(_KEY_BYTES, len(value) + 1, _KEY_BYTES)
    return [RecordKey(value[end - _KEY_BYTES : end]) for end in ends]


async def warm_up(driver: Driver, keys: Sequence[RecordKey], metrics: Metrics) -> None:
    """Bring blocks up one after the other, as long as the host stays below its low mark.

    One at a time, and at the back of every queue: whoever asks for a block goes first.
    """
    catalog = driver.catalog
    host = catalog.residents.shelves[Tier.HOST]
    for key in keys:
        if not catalog.places(key):
            continue
        entry = catalog.residents.entries[key]
        if host.whole.used + host.footprint(entry.raw_bytes) > host.whole.low:
            return
        if await driver.ask(Request(partial(Prefetch, key=key)), math.inf) is None:
            metrics.warmed.inc()
        await asyncio.sleep(0)
