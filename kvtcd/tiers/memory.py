"""Blocks in host memory: one slab, allocated once."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtcd.core.keys import RecordKey
from kvtcd.tiers.arena import Arena, Extent

GRANULE = 4096
Bytes = npt.NDArray[np.uint8]


class HostMemory:
    """The host tier: raw blocks in one anonymous mapping.

    Not safe for concurrent `allocate` and `free`, which belong to one thread; the bytes of different blocks
    may be read and written by any thread meanwhile.

    Args:
        capacity: bytes; rounded down to whole pages.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self._arena = Arena(self.capacity, GRANULE)
        self._map = mmap.mmap(-1, max(self.capacity, GRANULE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults on multi-megabyte blocks
        self._map.madvise(mmap.MADV_DONTDUMP)  # a core file must not hold prompts
        self._slab = np.frombuffer(self._map, dtype=np.uint8)
        self._blocks: dict[RecordKey, tuple[Extent, ...]] = {}

    def allocate(self, key: RecordKey, nbytes: int) -> None:
        """Take room for a block.

        Raises:
            MemoryError: less is free; the caller keeps account, so this is a bug of the caller.
        """
        self._blocks[key] = self._arena.allocate(nbytes)

    def free(self, key: RecordKey) -> None:
        """Give back the room of a block."""
        self._arena.release(self._blocks.pop(key))

    def pieces(self, key: RecordKey) -> Sequence[Bytes]:
        """Return the writable bytes of a block, in order; valid until `free`."""
        return [self._slab[offset : offset + nbytes] for offset, nbytes in self._blocks[key]]
