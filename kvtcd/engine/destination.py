"""Where a reader wants a block that is unpacked for him alone."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvtcd.core.device_bytes import DeviceBytes


class Destination(Protocol):
    """Room for a block in memory of a reader on a GPU.

    It is asked for when the packed copy is pinned, and left when nothing writes to it any more.
    """

    @property
    def gpu(self) -> int:
        """CUDA's number of the GPU in this process."""

    def held(self, nbytes: int) -> AbstractAsyncContextManager[DeviceBytes]:
        """Keep so many bytes there, once their owner is done with what he has queued on them.

        Raises:
            NotFound: it is no more.
            BadRequest: it is too small.
            DeadlineExceeded: its owner was not done in time.
        """
