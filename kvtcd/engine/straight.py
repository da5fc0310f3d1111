"""Blocks that go straight into memory of an engine on a GPU, from where they lie, and not over the host."""

from __future__ import annotations

from kvtcd.core import events as ev
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place
from kvtcd.core.reason import Reason
from kvtcd.engine.destination import Destination
from kvtcd.engine.driver import Driver
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.readers import Readers

_PACKED = frozenset({Place.PACKED, Place.DISK})
_GPU = frozenset({Place.GPU})


class Straight:
    """Knows whence a block can go straight to its reader, and has it go. All methods belong to the loop.

    Args:
        driver: owns the catalog.
        readers: told who reads.
    """

    def __init__(self, driver: Driver, readers: Readers) -> None:
        self._driver, self._readers = driver, readers

    def places(self, namespace: Namespace, into: Destination | None) -> frozenset[Place]:
        """Return whence blocks of a namespace can go there.

        From a packed copy, where its codec works on that GPU; from the GPU tier, where that GPU is its home:
        each GPU reaches its own memory without a bus.
        """
        if into is None:
            return frozenset()
        home = self._driver.catalog.residents.gpus.home(namespace.number)
        copied = _GPU if home is not None and home.device == f"cuda:{into.gpu}" else frozenset()
        return copied | (_PACKED if into.gpu == namespace.codec.gpu else frozenset())

    async def landed(self, key: RecordKey, nbytes: int, place: Place, into: Destination) -> bool:
        """Have a block come from a pinned copy, and let go of that; tell whether it is there.

        One on the host stays pinned: it does not go straight.
        """
        if place is Place.HOST:
            return False
        reason: Reason | None = Reason.FAILED
        try:
            with self._readers.reading():
                async with into.held(nbytes) as memory:
                    reason = await self._driver.land(key, place, memory)
        finally:
            self._driver.tell(ev.Release(key, place, reason is Reason.DAMAGED))
        return reason is None
