"""Coefficients rounded to multiples of a step, and their codes packed for the entropy stage.

A code is the zigzag of the multiple: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4. A component of width ``b`` holds
codes below ``2^b - 1`` in `b` bits each (`pack`); that last value stands for an *escape*, and how far beyond
it the code is goes into a list of 16-bit numbers, in order of width, component and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtcd.codec.pack import pack, unpack
from kvtcd.codec.widths import Widths
from kvtcd.core.errors import BadField

LIMIT = 32_000
"""Largest multiple that can be coded; its zigzag fits 16 bits."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The codes of a run of tokens of one stream.

    Attributes:
        codes: width in bits -> packed codes, uint8 ``[components of the width, W]``, in order of component.
        escapes: int32 ``[n]``, each below 2^16.
    """

    codes: Mapping[int, Tensor]
    escapes: Tensor


def multiples(coefficients: Tensor, steps: Tensor) -> Tensor:
    """Round coefficients ``[rank, T]`` to multiples of the steps ``[T]``; float32, ties to even."""
    return (coefficients / steps).round_()


def packed(rounded: Tensor, widths: Widths) -> Packed:
    """Pack multiples ``[rank, T]``, no larger than `LIMIT`."""
    whole = rounded.to(torch.int32)
    zigzag = (whole << 1) ^ (whole >> 31)
    codes: dict[int, Tensor] = {}
    escapes = [torch.empty(0, dtype=torch.int32, device=rounded.device)]
    for bits, rows in widths.rows.items():
        chosen, most = zigzag.index_select(0, rows), (1 << bits) - 1
        narrow = chosen.clamp(max=most).to(torch.uint8)
        escapes.append(chosen.view(-1)[_places(narrow, most)] - most)
        codes[bits] = pack(narrow, bits)
    return Packed(codes, torch.cat(escapes))


def unpacked(coded: Packed, widths: Widths, tokens: int) -> Tensor:
    """Return the multiples ``[rank, T]`` that `packed` packed, int32.

    Raises:
        BadField: there are fewer or more escapes than codes that ask for one.
    """
    device = coded.escapes.device
    zigzag = torch.zeros((widths.rank, tokens), dtype=torch.int32, device=device)
    used = 0
    for bits, rows in widths.rows.items():
        narrow = unpack(coded.codes[bits], bits, tokens)
        beyond, chosen = _places(narrow, (1 << bits) - 1), narrow.to(torch.int32)
        escapes = coded.escapes[used : used + len(beyond)]
        if len(escapes) < len(beyond):
            raise BadField("blob", f"{len(coded.escapes)} escapes are fewer than its codes ask for")
        chosen.view(-1)[beyond] += escapes
        used += len(beyond)
        zigzag.index_copy_(0, rows, chosen)
    if used < len(coded.escapes):
        raise BadField("blob", f"{len(coded.escapes)} escapes where codes ask for {used}")
    return (zigzag >> 1) ^ -(zigzag & 1)


def _places(codes: Tensor, value: int) -> Tensor:
    """Where codes have a value: flat indices, int64, ascending."""
    if codes.device.type == "cpu":  # numpy takes a seventh of the time
        return torch.from_numpy(np.flatnonzero(codes.numpy() == value))
    return torch.nonzero((codes == value).flatten()).flatten()
