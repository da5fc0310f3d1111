"""Host memory that a GPU reads and writes on its own, while nobody waits: registered once, chunk by chunk.

Copies from memory that is not registered go through a buffer of the driver, and those to it hold up the
thread that asked for them. Nothing else depends on it: where it cannot be had, or only of a part, everything
goes on, slower.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
_PORTABLE = 1
"""CUDA's name for memory that all devices reach, though one registers it: blocks and codecs may have one
each."""


class Pinned:
    """Memory that is registered with CUDA until it is closed; see `pin`.

    Attributes:
        share: of the memory that was asked for, 0 to 1.
    """

    def __init__(self, chunks: Sequence[Bytes], device: torch.device, share: float) -> None:
        self._chunks, self._device = chunks, device  # must not be unmapped before
        self.share = share

    def close(self) -> None:
        """Take the registration back. Blocking; nothing may be copying any more."""
        for chunk in self._chunks:
            if error := _tried(self._device, "cudaHostUnregister", chunk.ctypes.data):
                _log.warning("host memory could not be unpinned: %s", error)


def pin(chunks: Sequence[Bytes], device: torch.device) -> Pinned:
    """Register memory with CUDA; warn where that fails, and do with what has been registered by then.

    Blocking, for seconds: every page is made present first, 1 to 2 GB a second. The memory then stays
    resident.

    Args:
        chunks: the parts of a mapping that copies do not lie across, in order (`memory.HostMemory.chunks`).
        device: whose context registers it. One that is not in use would be given one, hundreds of MiB of it.
    """
    whole = sum(chunk.nbytes for chunk in chunks)
    pinned: list[Bytes] = []
    for chunk in chunks:
        error = _tried(device, "cudaHostRegister", chunk.ctypes.data, chunk.nbytes, _PORTABLE)
        if error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "none" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
            _log.warning(
                "%s of %s bytes of host memory cannot be pinned (%s): blocks there go to and from the GPU"
                " more slowly. Raise the limit on locked memory, which is %s here (LimitMEMLOCK=infinity in"
                " the systemd unit, or ulimit -l), or make host.capacity smaller",
                f"{whole - sum(each.nbytes for each in pinned):,}", f"{whole:,}", error, limit,
            )  # fmt: skip
            break  # the ones behind it would fail alike
        pinned.append(chunk)
    return Pinned(pinned, device, sum(each.nbytes for each in pinned) / whole)


def _tried(device: torch.device, name: str, *given: int) -> str | None:
    """Call a function of the CUDA runtime for a device; return what went wrong, if so.

    On a thread of its own: CUDA keeps the last error of each thread, and torch would find it there and
    blame its own next kernel.
    """

    def attempt() -> str | None:
        try:
            with torch.cuda.device(device):
                cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch says no types
                code = getattr(cuda, name)(*given)
                return str(cuda.cudaGetErrorString(code)) if int(code) else None
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(1, thread_name_prefix="kvtcd-pin") as threads:
        return threads.submit(attempt).result()
