"""Memory of a file, mapped where its pages can be huge: a copy through pages of 4 KiB takes a third longer.

Whether a memfd gets huge pages by itself is the host's to say (``shmem_enabled``, ``never`` by default).
Asked for them explicitly (MADV_COLLAPSE, Linux 6.1), the kernel gives them all the same, where the memory is
mapped at a multiple of their size.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

HUGE = 2 << 20
_COLLAPSE = 25
_TRIES = 8
_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Map the beginning of a file, shared and writable, where huge pages can lie if that can be had.

    Raises:
        OSError, ValueError, OverflowError: it cannot be mapped.
    """
    memory = _tried(fd, nbytes)
    elsewhere: list[mmap.mmap] = []  # kept until the end, so that nothing is put there once more
    while nbytes >= HUGE and _address(memory) % HUGE and len(elsewhere) < _TRIES:
        elsewhere.append(memory)
        memory = _tried(fd, nbytes)
    for other in elsewhere:
        other.close()
    return memory


def _tried(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file. Python cannot say where: so a hole is made, of the right size at the right place.

    The kernel puts the file there, or into another one that was there already.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    around = size + 2 * HUGE
    begin = _libc.mmap(None, around, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if begin == _FAILED:
        return mmap.mmap(fd, nbytes)
    hole = -(-(begin + 1) // HUGE) * HUGE  # with a page at least on either side, so that it stays by itself
    _libc.munmap(hole, size)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        _libc.munmap(begin, hole - begin)
        _libc.munmap(hole + size, begin + around - hole - size)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_huge(memory: mmap.mmap, number: int) -> None:
    """Have the huge page of that number take the place of small ones, if it can; bytes stay as they are."""
    with suppress(OSError):
        memory.madvise(_COLLAPSE, number * HUGE, HUGE)
