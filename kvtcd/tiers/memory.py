"""Blocks in host memory: one slab, allocated once."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Form
from kvtcd.tiers.arena import Arena, Extent

GRANULE = 4096
CHUNK = 64 << 30
"""Bytes that a GPU is made to reach by itself at once. Drivers refuse to register 512 GiB, however much is
free, and to copy what lies across the border of two registrations, so no piece of a block does."""
Bytes = npt.NDArray[np.uint8]


class HostMemory:
    """The host tier: blocks in one anonymous mapping, raw and packed side by side.

    Not safe for concurrent `allocate` and `free`, which belong to one thread; the bytes of different blocks
    may be read and written by any thread meanwhile.

    Args:
        capacity: bytes; rounded down to whole pages.

    Attributes:
        slab: all of it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self._arena = Arena(self.capacity, GRANULE)
        self._map = mmap.mmap(-1, max(self.capacity, GRANULE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults on multi-megabyte blocks
        self._map.madvise(mmap.MADV_DONTDUMP)  # a core file must not hold prompts
        self._map.madvise(mmap.MADV_DONTFORK)  # a fork would move pages from under a GPU that knows them
        self.slab: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._copies: dict[tuple[RecordKey, Form], tuple[Extent, ...]] = {}

    def allocate(self, key: RecordKey, nbytes: int, form: Form = Form.RAW) -> None:
        """Take room for a copy of a block.

        Raises:
            MemoryError: less is free; the caller keeps account, so this is a bug of the caller.
        """
        self._copies[key, form] = self._arena.allocate(nbytes)

    def free(self, key: RecordKey, form: Form = Form.RAW) -> None:
        """Give back the room of a copy; one that has none (its move failed before) is ignored."""
        if extents := self._copies.pop((key, form), None):
            self._arena.release(extents)

    def pieces(self, key: RecordKey, form: Form = Form.RAW) -> Sequence[Bytes]:
        """Return the writable bytes of a copy, in order, none of them across `chunks`; valid until `free`."""
        return [piece for extent in self._copies[key, form] for piece in self._cut(*extent)]

    @property
    def chunks(self) -> Sequence[Bytes]:
        """All of it, in parts of `CHUNK` bytes and one that may be shorter."""
        return list(self._cut(0, self.slab.size))

    def _cut(self, offset: int, nbytes: int) -> Iterator[Bytes]:
        end = offset + nbytes
        while offset < end:
            border = min(end, (offset // CHUNK + 1) * CHUNK)
            yield self.slab[offset:border]
            offset = border
