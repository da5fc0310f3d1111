"""Host memory that a GPU reads and writes on its own, while nobody waits: registered once, as a whole.

Copies from memory that is not registered go through a buffer of the driver, and those to it hold up the
thread that asked for them. Nothing else depends on it: where it cannot be had, everything goes on, slower.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
_PORTABLE = 1
"""CUDA's name for memory that all devices reach: blocks and codecs may have one each."""


class Pinned:
    """Memory that is registered with CUDA until it is closed; see `pin`."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory  # must not be unmapped before

    def close(self) -> None:
        """Take the registration back. Blocking; nothing may be copying any more."""
        address = self._memory.ctypes.data
        if error := _tried(lambda cuda: cuda.cudaHostUnregister(address)):
            _log.warning("host memory could not be unpinned: %s", error)


def pin(memory: Bytes) -> Pinned | None:
    """Register memory with CUDA, or warn and return None where that fails.

    Blocking, for seconds: every page is made present first, 1 to 2 GB a second. The memory then stays
    resident.

    Args:
        memory: the start and the length of a mapping.
    """
    address, nbytes = memory.ctypes.data, memory.nbytes
    if error := _tried(lambda cuda: cuda.cudaHostRegister(address, nbytes, _PORTABLE)):
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "none" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
        _log.warning(
            "%s bytes of host memory cannot be pinned (%s): blocks go to and from the GPU more slowly. Raise"
            " the limit on locked memory, which is %s here (LimitMEMLOCK=infinity in the systemd unit, or"
            " ulimit -l), or make host.capacity smaller",
            f"{nbytes:,}", error, limit,
        )  # fmt: skip
        return None
    return Pinned(memory)


def _tried(call: Callable[[Any], Any]) -> str | None:
    """Call the CUDA runtime; return what went wrong, if so.

    On a thread of its own: CUDA keeps the last error of each thread, and torch would find it there and
    blame its own next kernel.
    """

    def attempt() -> str | None:
        try:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch says no types
            code = call(cuda)
            return str(cuda.cudaGetErrorString(code)) if int(code) else None
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(1, thread_name_prefix="kvtcd-pin") as threads:
        return threads.submit(attempt).result()
