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
    components, tokens = codes.shape
    width = packed_width(tokens, bits)
    missing = width * _BYTE // bits - tokens
    whole = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    shifted = whole.reshape(components, -1, width) << _shifts(bits, codes.device)
    return shifted.sum(dim=1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, tokens: int) -> Tensor:
    """Return the uint8 codes ``[components, T]`` that `pack` packed."""
    if bits == _BYTE:
        return packed
    codes = (packed[:, None, :] >> _shifts(bits, packed.device)) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :tokens]


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return by how much the codes of a byte are shifted: uint8, a column."""
    return torch.arange(0, _BYTE, bits, dtype=torch.uint8, device=device)[:, None]
