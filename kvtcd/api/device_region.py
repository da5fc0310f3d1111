"""A region on a GPU: bytes go between there and the host tier without the host's copying them.

Blocks that are unpacked by the codec of the same GPU never come to the host; see `Part.destination`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvtcd.api.region import Region, View, require_room
from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.device_errors import DeviceUnshared
from kvtcd.core.regions import Span
from kvtcd.cuda.imports import Imported, Imports
from kvtcd.engine.lanes import Lane
from kvtcd.engine.ports import Bytes
from kvtcd.engine.sessions import Lease, Slot


class DeviceRegion(Region):
    """Memory of a GPU that a client shares.

    Args:
        imports: where it is open.
        memory: as that knows it.
        lane: to which `imports` belongs.
        on_broken: told when it can be of no more use, and why.
    """

    kind = "device"

    def __init__(
        self, imports: Imports, memory: Imported, lane: Lane, on_broken: Callable[[DeviceUnshared], None]
    ) -> None:
        super().__init__(memory.nbytes, lane)
        self._imports, self._memory, self._on_broken = imports, memory, on_broken

    def view(self, span: Span) -> View:
        """Return how a part of it is copied."""
        return _DeviceView(self._imports, self._memory, span)

    def broken(self, error: DeviceUnshared) -> None:
        """Take note that it can be of no more use."""
        self._on_broken(error)

    async def release(self) -> None:
        """Let go of the memory; only then may its owner free it."""
        await self.lane.run(self._imports.close, self._memory)


class _DeviceView:
    def __init__(self, imports: Imports, memory: Imported, span: Span) -> None:
        self._imports, self._memory, self._span = imports, memory, span

    @property
    def there(self) -> DeviceBytes | None:
        found = self._memory.at(self._span.offset, self._span.length)
        return found if found.aligned else None

    def ready(self) -> bool:
        return self._imports.has_come(self._memory)

    def fill(self, slot: Slot) -> bool:
        if not self.ready():
            return False
        self._imports.read(self._memory, self._span.offset, _extents(slot.spaces()))
        slot.filled()
        return True

    def take(self, lease: Lease) -> bool:
        require_room(lease.nbytes, self._span.length)
        if not self.ready():
            return False
        pieces = (np.frombuffer(piece, dtype=np.uint8) for piece in lease.pieces())
        self._imports.write(self._memory, self._span.offset, _extents(pieces))
        return True


def _extents(pieces: Iterable[Bytes]) -> list[tuple[int, int]]:
    """Return address and length of each piece of host memory."""
    return [(piece.ctypes.data, piece.nbytes) for piece in pieces]
