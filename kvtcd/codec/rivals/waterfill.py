"""Bits for coordinates of known variance: reverse water-filling (Cover and Thomas, 10.3.3) in whole bits.

A bit more divides the error of a coordinate by four, so bits go one by one to whatever has the largest error
then.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 8
"""Bits of one coordinate."""


def water_fill(variances: Tensor, total: int) -> Tensor:
    """Return bits, int64 ``[..., D]``, with the same sum along the last axis everywhere.

    Args:
        variances: ``[..., D]``; of equal ones the first gets the bit.
        total: bits to give, at most `MOST` for each coordinate.
    """
    steps = 4.0 ** -torch.arange(MOST, dtype=torch.float64, device=variances.device)
    errors = (variances.to(torch.float64)[..., None] * steps).flatten(-2)
    given = errors.argsort(dim=-1, descending=True, stable=True)[..., :total]
    taken = torch.zeros_like(errors, dtype=torch.int64).scatter_(-1, given, 1)
    bits: Tensor = taken.view(*variances.shape, MOST).sum(dim=-1)
    return bits
