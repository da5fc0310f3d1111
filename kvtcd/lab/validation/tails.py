"""Checks of tails: of each coordinate about its own mean, and of whole rows.

All coordinates pooled have a kurtosis of 5 to 120 on every real model, since their variances differ, which
says nothing. A coordinate that does not vary has no tails, and is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtcd.core.drift import KURTOSIS
from kvtcd.lab.dimension import dimension
from kvtcd.lab.validation.check import STILL, TINY, Check

_HILL = 3.0
_TAIL = 0.01
"""Share of the rows that Hill's index is of."""
_LARGEST = 10.0
_QUANTILE = 4.9
"""Of the normal law: one row in two million, so that of `ROWS` normal rows one in a thousand has it."""


def varying(x: Tensor) -> Tensor:
    """Return the coordinates of rows ``[n, p]`` that vary, about their means, float64 ``[n, q]``."""
    wide = x.to(torch.float64)
    centred = wide - wide.mean(dim=0)
    variance, moment = centred.square().mean(dim=0), wide.square().mean(dim=0)
    return centred[:, (variance > STILL * moment) & (variance > TINY)]


def of_coordinates(x: Tensor) -> tuple[list[Check], Tensor]:
    """Look at the coordinates of rows ``[n, p]``; return the kurtosis of each that varies as well."""
    own = varying(x)
    if not own.shape[1]:
        why = "no coordinate varies, so that there are no tails"
        nothing = math.nan
        return [
            Check("kurtosis", "both", "tails", nothing, KURTOSIS, holds=True, meaning=why),
            Check("Hill index", "both", "tails", nothing, _HILL, holds=True, meaning=why),
        ], torch.empty(0)
    kurtosis = ((own**4).mean(dim=0) / own.square().mean(dim=0) ** 2).to(torch.float32)
    count = max(2, int(_TAIL * len(own)))
    largest = own.abs().topk(count + 1, dim=0).values.clamp_min(TINY)
    hill = float((1 / (largest[:-1] / largest[-1]).log().mean(dim=0).clamp_min(TINY)).median())
    typical, wide = float(kurtosis.median()), float((kurtosis > KURTOSIS).float().mean())
    still = x.shape[1] - own.shape[1]
    constant = f"; {still:,} coordinates do not vary" if still else ""
    return [
        Check(
            "kurtosis",
            "both",
            "tails",
            typical,
            KURTOSIS,
            typical <= KURTOSIS,
            f"kurtosis of a coordinate {typical:.1f} (normal: 3; above {KURTOSIS:g} in {wide:.1%} of "
            f"them){constant}",
        ),
        Check(
            "Hill index",
            "both",
            "tails",
            hill,
            _HILL,
            hill >= _HILL,
            f"the largest {count} values of a coordinate fall off with exponent {hill:.1f}",
        ),
    ], kurtosis


def of_largest(x: Tensor) -> Check:
    """Look at the row with the most energy, of rows ``[n, p]``.

    Rows of few dimensions differ by themselves: the bound is what the largest of `ROWS` normal rows of as
    many reaches once in a thousand times, if that is more. Their energies are about chi-square with as many
    degrees of freedom as the participation ratio says (Satterthwaite 1946), whose quantile is that of Wilson
    and Hilferty (1931).
    """
    centred = (x - x.mean(dim=0)).to(torch.float64)
    energy = centred.square().sum(dim=1)
    mean = float(energy.mean())
    times = float(energy.max()) / mean if mean > TINY else 1.0
    # Bias corrected, it is of products of different rows: one row that is large does not change it.
    dimensions = max(dimension(centred).corrected, 1.0)
    step = 2 / (9 * dimensions)
    bound = max(_LARGEST, (1 - step + _QUANTILE * step**0.5) ** 3)
    return Check(
        "largest row",
        "layers",
        "tails",
        times,
        bound,
        times <= bound,
        f"the largest token has {times:.1f} times the mean energy: rows of the basis of all layers are not "
        "normalised, so that few such tokens would rule it",
    )
