"""Values in groups, each with a scale and a shift: the rule of KIVI (Liu et al., arXiv 2402.02750).

A group is a run of neighbours along one axis; the last one may be short. Scale and shift are float16 and
rounded before coding (`codec.quantize`), so a group of equal values divides by something.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.quantize import dequantize, quantize, ranges
from kvtcd.codec.rivals import narrow
from kvtcd.codec.rivals.method import F16, Field, Site

TOKENS, CHANNELS = 1, 3
"""Axes of ``[L, T, H, D]``."""


class Groups:
    """Values of one stream, quantised in groups.

    Args:
        site: the stream.
        bits: of a value, at most 7.
        size: of a group.
        axis: along which its values lie: `TOKENS` or `CHANNELS`.
    """

    def __init__(self, site: Site, bits: int, size: int, axis: int) -> None:
        self._site, self._bits, self._size, self._axis = site, bits, size, axis

    def fields(self, tokens: int) -> list[Field]:
        """Return codes, then scales, then shifts, ``[groups]``."""
        shape = self._shape(tokens)
        count = shape.numel()
        groups = count // shape[self._axis] * -(-shape[self._axis] // self._size)
        return [*narrow.fields(count, self._bits), Field(F16, (groups,)), Field(F16, (groups,))]

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the arrays of float32 ``[L, T, H, D]``."""
        grouped = self._grouped(x)
        scale, shift = ranges(grouped, self._bits)
        codes = self._whole(quantize(grouped, scale, shift, self._bits), x.shape)
        return [*narrow.split(codes, self._bits), scale.flatten(), shift.flatten()]

    def decode(self, arrays: Sequence[Tensor], tokens: int) -> Tensor:
        """Return float32 ``[L, T, H, D]``."""
        *packed, scale, shift = arrays
        shape = self._shape(tokens)
        codes = self._grouped(narrow.join(packed, self._bits, shape.numel()).view(shape))
        ends = (codes.shape[0], codes.shape[2])
        return self._whole(dequantize(codes, scale.view(ends), shift.view(ends), self._bits), shape)

    def _shape(self, tokens: int) -> torch.Size:
        site = self._site
        return torch.Size((site.layers, tokens, site.heads, site.dim))

    def _grouped(self, x: Tensor) -> Tensor:
        """Return ``[groups, size, others]``; a short group is filled with its last value."""
        moved = x.movedim(self._axis, 1).flatten(2) if self._axis == TOKENS else x.reshape(-1, x.shape[3], 1)
        length = moved.shape[1]
        short = -length % self._size
        if short:
            moved = torch.cat((moved, moved[:, -1:].expand(-1, short, -1)), dim=1)
        return moved.reshape(-1, self._size, moved.shape[2])

    def _whole(self, grouped: Tensor, shape: torch.Size) -> Tensor:
        """Undo `_grouped`."""
        if self._axis == TOKENS:
            lines = grouped.reshape(shape[0], -1, shape[2] * shape[3])[:, : shape[1]]
            return lines.reshape(shape)
        return grouped.reshape(shape[:3].numel(), -1)[:, : shape[3]].reshape(shape)
