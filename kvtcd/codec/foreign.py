"""Memory of a GPU that another process has, as a tensor: neither copied nor owned."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.core.device_bytes import DeviceBytes


class Foreign:
    """Such memory on the device where a codec works.

    Args:
        device: a CUDA device.

    Attributes:
        gpu: CUDA's number of it in this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gpu = device.index or 0

    def tensor(self, memory: DeviceBytes) -> Tensor:
        """Return bytes as flat uint8; they are no longer there than whoever has opened them says.

        Raises:
            RuntimeError: torch does not take them as they lie. What was written to a copy would be lost.
        """
        found = torch.as_tensor(memory, device=self._device)
        if found.data_ptr() != memory.pointer:
            raise RuntimeError(f"memory at {memory.pointer:#x} is not used as it lies on {self._device}")
        return found
