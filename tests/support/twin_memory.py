"""Memory of a GPU where there is none, as a codec's device gets hold of it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtcd.core.device_bytes import DeviceBytes


def at_address(memory: DeviceBytes) -> ctypes.Array:
    """Return what lies at an address that is one of this process's own memory."""
    return (ctypes.c_uint8 * memory.nbytes).from_address(memory.pointer)


class TwinMemory:
    """Takes the place of `codec.foreign.Foreign`.

    Args:
        find: what lies at an address.
        wrap: makes a tensor of host memory one of the device.

    Attributes:
        asked: what it was asked for.
        before: called before it answers.
    """

    gpu = 0

    def __init__(
        self,
        find: Callable[[DeviceBytes], object] = at_address,
        wrap: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._find, self._wrap = find, wrap
        self.asked: list[DeviceBytes] = []
        self.before: Callable[[], object] = lambda: None

    def tensor(self, memory: DeviceBytes) -> Tensor:
        """Return bytes as flat uint8, as they lie."""
        self.before()
        self.asked.append(memory)
        return self._wrap(torch.frombuffer(self._find(memory), dtype=torch.uint8))
