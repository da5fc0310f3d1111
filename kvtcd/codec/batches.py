"""Where the chunks of a blob lie in the buffers of a GPU, and which of them nobody has written.

Offsets are in bytes. Every chunk begins at a multiple of `ALIGN`, in the blob and in raw memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvtcd.core.blob import CHUNK_BYTES, Section, aligned

_WORD = 8
_PATTERN = 0x5AC396E17B2D4F88
"""What memory holds that nobody has written: eight different bytes, so no run of a chunk that shrinks."""


class Chunks(NamedTuple):
    """Where chunks lie: packed in one buffer, raw in another. One entry a chunk."""

    packed: list[int]
    packed_sizes: list[int]
    raw: list[int]
    raw_sizes: list[int]


class Copy(NamedTuple):
    """A stretch that is stored as it is: packed at `source`, raw at `target`."""

    source: int
    target: int
    nbytes: int


class Tables(NamedTuple):
    """Where everything of a blob lies on the device.

    Attributes:
        coded: chunks to inflate.
        stored: what is to be copied; chunks that are neighbours on both sides are one stretch.
        sections: offset of each section's raw bytes.
        nbytes: of all raw bytes, with gaps.
    """

    coded: Chunks
    stored: list[Copy]
    sections: list[int]
    nbytes: int


def tables(sections: Iterable[Section], base: int) -> Tables:
    """Lay out the raw bytes of a blob's sections.

    Args:
        sections: in the order of the blob.
        base: what offsets of packed bytes count from, a multiple of `ALIGN` in the blob.
    """
    coded, stored, starts, end = Chunks([], [], [], []), list[Copy](), list[int](), 0
    for section in sections:
        starts.append(end)
        at = section.offset - base
        for number, (nbytes, as_is) in enumerate(section.chunks):
            begin = end + number * CHUNK_BYTES
            if as_is:
                _append(stored, Copy(at, begin, nbytes))
            else:
                raw_size = min(CHUNK_BYTES, section.raw_bytes - number * CHUNK_BYTES)
                for column, value in zip(coded, (at, nbytes, begin, raw_size), strict=True):
                    column.append(value)
            at += aligned(nbytes)
        end += aligned(section.raw_bytes)
    return Tables(coded, stored, starts, end)


def _append(stored: list[Copy], new: Copy) -> None:
    """Append a stretch, or lengthen the last one, over what is between them for alignment."""
    if stored:
        source, target, nbytes = stored[-1]
        if (new.source, new.target) == (source + aligned(nbytes), target + aligned(nbytes)):
            stored[-1] = Copy(source, target, aligned(nbytes) + new.nbytes)
            return
    stored.append(new)


def blank(nbytes: int, device: torch.device) -> Tensor:
    """Return memory that `untouched` knows again, uint8, of at least so many bytes."""
    return torch.full((-(-nbytes // _WORD),), _PATTERN, dtype=torch.int64, device=device).view(torch.uint8)


def last_words(starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return where the last two words of chunks lie, counted in words, int64 ``[2, n]``.

    Of a chunk that has no two there is nothing: by so few bytes nobody can tell whether they were written.
    """
    ends = [start + size for start, size in zip(starts, sizes, strict=True) if size > _WORD]
    last = torch.tensor(ends, dtype=torch.int64).sub_(1).div_(_WORD, rounding_mode="floor")
    return torch.stack((last - 1, last))


def untouched(room: Tensor, last: Tensor) -> Tensor:
    """Tell of each chunk whether it ends as it was when `blank` made it, bool ``[n]``.

    Args:
        room: flat uint8, the chunks and all between them, from a multiple of a word on.
        last: of `last_words`, on the same device.
    """
    return (room.view(torch.int64)[last] == _PATTERN).all(dim=0)
