"""Codes of any width up to 8 bits, as many bits stored as they have.

A code of 3 bits is one of 2 and one of 1; each of these pieces fills bytes (`codec.pack`), so that no bit of
a byte is spare but in the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtcd.codec.pack import pack, packed_width, unpack
from kvtcd.codec.rivals.method import U8, Field

_BYTE = 8


def pieces(bits: int) -> list[int]:
    """Return the widths that codes of so many bits are cut into, the lowest bits first."""
    return [width for width in (_BYTE, 4, 2, 1) if bits & width]


def fields(count: int, bits: int) -> list[Field]:
    """Return the arrays of so many codes."""
    return [Field(U8, (packed_width(count, width),)) for width in pieces(bits)]


def split(codes: Tensor, bits: int) -> list[Tensor]:
    """Pack uint8 codes of any shape below ``2**bits``; one array for each piece."""
    rest, arrays = codes.reshape(1, -1), []
    for width in pieces(bits):
        arrays.append(pack(rest & ((1 << width) - 1), width).flatten())
        rest = rest >> width if width < _BYTE else rest
    return arrays


def join(arrays: Sequence[Tensor], bits: int, count: int) -> Tensor:
    """Return the uint8 codes ``[count]`` that `split` packed."""
    codes, at = torch.zeros(count, dtype=U8, device=arrays[0].device), 0
    for array, width in zip(arrays, pieces(bits), strict=True):
        codes |= unpack(array[None], width, count)[0] << at
        at += width
    return codes
