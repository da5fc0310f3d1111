"""Blocks on a GPU: one slab, allocated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.keys import RecordKey
from kvtcd.tiers.arena import Arena, Extent

GRANULE = 4096
Bytes = npt.NDArray[np.uint8]


class DeviceMemory:
    """The GPU tier: raw blocks in one allocation of a device.

    Not safe for concurrent `allocate` and `free`, which belong to one thread; different blocks may be copied
    by another meanwhile, on that thread's current stream. Copies are done when the stream is; from and to
    host memory that is not pinned they block.

    Args:
        capacity: bytes; rounded down to whole granules.
        device: where; ``cpu`` serves for tests.
        foreign: returns memory of that device as flat uint8, as it lies.

    Attributes:
        capacity, device: as given.

    Raises:
        torch.OutOfMemoryError: the device has less.
    """

    def __init__(
        self, capacity: int, device: torch.device, foreign: Callable[[DeviceBytes], torch.Tensor]
    ) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self.device, self._foreign = device, foreign
        self._arena = Arena(self.capacity, GRANULE)
        self._slab = torch.empty(self.capacity, dtype=torch.uint8, device=device)
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

    def upload(self, key: RecordKey, pieces: Sequence[Bytes]) -> None:
        """Copy a block from host memory."""
        for here, there in self._runs(key, _tensors(pieces)):
            here.copy_(there, non_blocking=True)

    def download(self, key: RecordKey, pieces: Sequence[Bytes]) -> None:
        """Copy a block to host memory."""
        for here, there in self._runs(key, _tensors(pieces)):
            there.copy_(here, non_blocking=True)

    def deliver(self, key: RecordKey, out: DeviceBytes) -> None:
        """Copy a block to memory of this device that another has, as many bytes as the block."""
        for here, there in self._runs(key, [self._foreign(out)]):
            there.copy_(here, non_blocking=True)

    def _runs(self, key: RecordKey, others: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return runs of a block, each with the same run of other memory: cuts of either side cut both."""
        runs = []
        for offset, nbytes in self._blocks[key]:
            while nbytes:
                size = min(nbytes, others[0].numel())
                runs.append((self._slab[offset : offset + size], others[0][:size]))
                others[:1] = [others[0][size:]] if size < others[0].numel() else []
                offset, nbytes = offset + size, nbytes - size  # noqa: PLW2901 - the extent is eaten up
        return runs


def _tensors(pieces: Sequence[Bytes]) -> list[torch.Tensor]:
    return [torch.from_numpy(piece) for piece in pieces]
