"""What errors say that a GPU has no memory left.

torch has a class for it where its own pool finds none. CUDA finds none as well where it loads a kernel at its
first use or makes an event, cuBLAS where the first product on a thread makes a handle
(https://github.com/pytorch/pytorch/issues/128601), Triton where it loads what it has compiled: all of these
are told by a number, or by their text. From none of them is a device lost.
"""

from __future__ import annotations

import re

_MEMORY_ALLOCATION = 2
"""``cudaErrorMemoryAllocation``, and ``CUDA_ERROR_OUT_OF_MEMORY``."""
_TEXT = re.compile(r"out.of.memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)", re.IGNORECASE)


def exhausted(error: BaseException) -> bool:
    """Tell whether an error of torch, or of what works beside it, says that the device has no memory left."""
    if not isinstance(error, RuntimeError):
        return False
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    numbered = getattr(error, "error_code", None) == _MEMORY_ALLOCATION
    return named or numbered or _TEXT.search(str(error)) is not None
