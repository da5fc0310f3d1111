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
    whole = rounded.index_select(0, widths.order).to(torch.int32)
    zigzag = (whole << 1) ^ (whole >> 31)
    narrow = torch.minimum(zigzag, widths.most).to(torch.uint8)
    beyond = _places(narrow, widths)
    escapes = (zigzag - widths.most).view(-1)[beyond]
    parts = torch.split(narrow, [len(rows) for rows in widths.rows.values()])
    codes = {bits: pack(part, bits) for bits, part in zip(widths.rows, parts, strict=True)}
    return Packed(codes, escapes)


def unpacked(coded: Packed, widths: Widths, tokens: int) -> Tensor:
    """Return the multiples ``[rank, T]`` that `packed` packed, int32.

    Raises:
        BadField: there are fewer or more escapes than codes that ask for one.
    """
    device = coded.escapes.device
    none = torch.empty((0, tokens), dtype=torch.uint8, device=device)
    narrow = torch.cat([none, *(unpack(coded.codes[bits], bits, tokens) for bits in widths.rows)])
    beyond = _places(narrow, widths)
    if len(coded.escapes) != len(beyond):
        raise BadField("blob", f"{len(coded.escapes)} escapes where codes ask for {len(beyond)}")
    chosen = narrow.to(torch.int32)
    chosen.view(-1).index_add_(0, beyond, coded.escapes)
    zigzag = torch.zeros((widths.rank, tokens), dtype=torch.int32, device=device)
    zigzag.index_copy_(0, widths.order, chosen)
    return (zigzag >> 1) ^ -(zigzag & 1)


def _places(narrow: Tensor, widths: Widths) -> Tensor:
    """Where codes, in order of width, stand for themselves plus an escape: flat indices, int64, ascending."""
    if narrow.device.type == "cpu":  # numpy takes a seventh of the time
        return torch.from_numpy(np.flatnonzero(narrow.numpy() == widths.most.numpy()))
    return torch.nonzero((narrow == widths.most).flatten()).flatten()
