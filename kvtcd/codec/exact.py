"""Exact coding of a run of tokens: byte planes, component-major, each through the entropy stage.

One section per stream and byte of the element, lowest byte first. Within a plane the order is ``[L, H, D,
T]``: the top bytes (sign and exponent) of one channel resemble each other, which is worth 13 % on keys and
costs nothing on values. Any bit pattern survives, NaN and infinity included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtcd.codec.sections import Part, read, require, write
from kvtcd.core.blob import Blob, Kind, Run, Section

_WORD = {2: torch.int16, 4: torch.int32}


def encode_exact(views: Sequence[Tensor], start: int, count: int) -> list[Run]:
    """Return the sections of tokens ``start .. start + count - 1`` of all streams ``[L, T, H, D]``."""
    runs: list[Run] = []
    for index, view in enumerate(views):
        words = _words(view, start, count).permute(0, 2, 3, 1).contiguous()
        for plane in range(view.itemsize):
            data = (words >> (8 * plane)).to(torch.uint8)
            runs.append(write(Part(Kind.PLANE, index, plane), start, count, data))
    return runs


def decode_exact(
    blob: Blob, found: Mapping[Part, Section], views: Sequence[Tensor], start: int, count: int
) -> None:
    """Write an exact run into the views of a block.

    Raises:
        BadChecksum, BadField: a section is damaged, or the set of them does not fit the layout.
    """
    require(
        found,
        {
            Part(Kind.PLANE, index, plane): view[:, :count].numel()
            for index, view in enumerate(views)
            for plane in range(view.itemsize)
        },
    )
    for index, view in enumerate(views):
        target = _words(view, start, count)
        layers, _, heads, dim = target.shape
        words = torch.zeros((layers, heads, dim, count), dtype=target.dtype)
        for plane in range(view.itemsize):
            data = read(blob, found[Part(Kind.PLANE, index, plane)]).view(words.shape)
            words |= data.to(words.dtype) << (8 * plane)
        target.copy_(words.permute(0, 3, 1, 2))


def _words(view: Tensor, start: int, count: int) -> Tensor:
    """The tokens of a run as integers of the element's size: a view."""
    return view[:, start : start + count].view(_WORD[view.itemsize])
