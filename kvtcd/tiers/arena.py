"""Room in one slab of memory: extents given out, taken back, joined again. No memory is touched here."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class Extent(NamedTuple):
    """A run of bytes in the slab."""

    offset: int
    nbytes: int


class Arena:
    """Allocator of a slab of `capacity` bytes, in units of `granule`.

    What is asked for may come in several extents: an allocation fails only when the slab holds too little in
    all, never because free room is scattered. Blocks of a namespace have one size, so in practice nearly
    every allocation is one extent.

    Args:
        capacity: bytes, a multiple of `granule`.
        granule: unit of allocation in bytes.
    """

    def __init__(self, capacity: int, granule: int) -> None:
        if capacity % granule:
            raise ValueError(f"capacity {capacity} is not a multiple of {granule}")
        self.capacity, self.granule = capacity, granule
        self._free = [Extent(0, capacity)] if capacity else []  # by offset; no two of them touch
        self.free_bytes = capacity

    def allocate(self, nbytes: int) -> tuple[Extent, ...]:
        """Take room for `nbytes`; the last extent is cut to what was asked for.

        Raises:
            MemoryError: less is free.
        """
        need = -(-nbytes // self.granule) * self.granule
        if need > self.free_bytes or nbytes <= 0:
            raise MemoryError(f"{nbytes} bytes asked for, {self.free_bytes} free")
        whole = next((i for i, extent in enumerate(self._free) if extent.nbytes >= need), None)
        taken: list[Extent] = []
        at = 0 if whole is None else whole
        rest = need
        while rest:
            offset, size = self._free[at]
            part = min(size, rest)
            taken.append(Extent(offset, part))
            if part == size:
                del self._free[at]
            else:
                self._free[at] = Extent(offset + part, size - part)
            rest -= part
        self.free_bytes -= need
        taken[-1] = Extent(taken[-1].offset, taken[-1].nbytes - (need - nbytes))
        return tuple(taken)

    def release(self, extents: tuple[Extent, ...]) -> None:
        """Give back what `allocate` returned."""
        for offset, nbytes in extents:
            size = -(-nbytes // self.granule) * self.granule
            self.free_bytes += size
            self._give(Extent(offset, size))

    def _give(self, extent: Extent) -> None:
        """Insert a free extent and join it with those that touch it."""
        at = bisect_left(self._free, extent)
        offset, size = extent
        if at < len(self._free) and self._free[at].offset == offset + size:
            size += self._free.pop(at).nbytes
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size += before
        insort(self._free, Extent(offset, size))
