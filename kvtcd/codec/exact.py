"""Exact coding of a run of tokens: byte planes, component-major, each through the entropy stage.

One section per stream and byte of the element, lowest byte first. Within a plane the order is ``[L, H, D,
T]``: the top bytes (sign and exponent) of one channel resemble each other, which is worth 13 % on keys and
costs nothing on values. Any bit pattern survives, NaN and infinity included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtcd.codec.sections import Part, Plain, Scratch, plain
from kvtcd.core.blob import Kind
from kvtcd.core.layout import Layout

_WORD = {2: torch.int16, 4: torch.int32}


def exact_sizes(layout: Layout, count: int) -> dict[Part, int]:
    """The sections of an exact run of `count` tokens, with their uncompressed sizes."""
    return {
        Part(Kind.PLANE, index, plane): layout.features(stream) * count
        for index, stream in enumerate(layout.streams)
        for plane in range(layout.dtype.itemsize)
    }


def to_planes(views: Sequence[Tensor], start: int, count: int, scratch: Scratch) -> list[Plain]:
    """Return the sections of tokens ``start .. start + count - 1`` of all streams ``[L, T, H, D]``."""
    sections: list[Plain] = []
    for index, view in enumerate(views):
        words = _words(view, start, count).permute(0, 2, 3, 1).contiguous()
        for plane in range(view.itemsize):
            part = Part(Kind.PLANE, index, plane)
            sections.append(plain(part, start, count, words >> (8 * plane), scratch))
    return sections


def from_planes(found: Mapping[Part, Tensor], views: Sequence[Tensor], start: int, count: int) -> None:
    """Write an exact run into the views of a block, given its sections as `exact_sizes` has them."""
    for index, view in enumerate(views):
        target = _words(view, start, count)
        layers, _, heads, dim = target.shape
        words = torch.zeros((layers, heads, dim, count), dtype=target.dtype, device=target.device)
        for plane in range(view.itemsize):
            data = found[Part(Kind.PLANE, index, plane)].view(words.shape).to(target.device)
            words |= data.to(words.dtype) << (8 * plane)
        target.copy_(words.permute(0, 3, 1, 2))


def _words(view: Tensor, start: int, count: int) -> Tensor:
    """The tokens of a run as integers of the element's size: a view."""
    return view[:, start : start + count].view(_WORD[view.itemsize])
