"""Narrow codes packed into bytes, each byte holding codes of one component only.

Split-half order: with ``W = ceil(T * bits / 8)`` bytes a component, byte ``j`` holds the codes of tokens
``j``, ``j + W``, ``j + 2W``, … from the lowest bits up. The codes of one component share a distribution, so a
byte's Huffman code is as good as a code of its own for each; and packing is adds of contiguous slices. Codes
past the last token are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTE = 8


def packed_width(tokens: int, bits: int) -> int:
    """Bytes of one component's codes."""
    return -(-tokens * bits // _BYTE)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[components, T]`` below ``2**bits`` into uint8 ``[components, W]``."""
    if bits == _BYTE:
        return codes
    tokens = codes.shape[1]
    width = packed_width(tokens, bits)
    packed = codes[:, :width].clone()
    for i in range(1, _BYTE // bits):
        part = codes[:, i * width : (i + 1) * width]
        packed[:, : part.shape[1]] |= part << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int, tokens: int) -> Tensor:
    """Return the uint8 codes ``[components, T]`` that `pack` packed."""
    if bits == _BYTE:
        return packed
    components, width = packed.shape
    mask = (1 << bits) - 1
    codes = torch.empty((components, width * _BYTE // bits), dtype=torch.uint8, device=packed.device)
    for i in range(_BYTE // bits):
        torch.bitwise_and(packed >> (i * bits), mask, out=codes[:, i * width : (i + 1) * width])
    return codes[:, :tokens]
