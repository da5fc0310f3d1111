"""Memory for one block on its way through a codec, used again for the next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ALIGN = 64
"""A cache line; and enough for every element type that bytes are viewed as."""


class HeapScratch:
    """Bytes handed out one run after the other, all taken back at once.

    It grows to what the largest block needed and stays there: the first touch of fresh memory costs three
    times a write to memory in use. One block at a time; what was taken for it is overwritten by the next.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes that nobody else uses until `clear`."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._used = start + nbytes
        if self._used > self._memory.size:
            # What was taken before keeps the old memory alive, and stays valid.
            self._memory = np.empty(max(self._used, 2 * self._memory.size), np.uint8)
        return self._memory[start : self._used]

    def clear(self) -> None:
        """Take everything back."""
        self._used = 0
