"""Bytes in memory of a GPU, as rooms hand them to each other without touching them."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNED = 16
"""Bytes at whose multiples a block may begin that kernels write: the most that one of them writes at once."""


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Flat bytes of a GPU at their address in this process. Whoever hands them out keeps them there.

    Attributes:
        gpu: CUDA's number of it in this process.
        pointer: address of the first one.
        nbytes: how many.
    """

    gpu: int
    pointer: int
    nbytes: int

    @property
    def aligned(self) -> bool:
        """Whether a block may begin here that kernels write."""
        return self.pointer % ALIGNED == 0

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Say so to libraries of tensors, which take it without a copy (version 3 of that interface)."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}
