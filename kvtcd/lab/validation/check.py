"""What one check says, and all that rows of a stream show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["budget", "tails", "gain", "drift", "codec", "note"]
"""What is wrong where a check fails: too few tokens, tails, nothing to gain, other texts, more error than the
basis promises; or nothing that decides."""
Basis = Literal["layers", "heads", "both"]
TINY = 1e-30
STILL = 1e-12
"""Energy about the mean over that about zero, below which float32 values are constant but for rounding."""


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of a stream, and whether it is as it should be.

    Attributes:
        name: what it is.
        basis: that of all layers, those of heads, or both.
        kind: what is wrong if not.
        value, bound: the figure, and what it must not pass; `value` is NaN where it is not defined.
        holds: whether it does not.
        meaning: for people.
    """

    name: str
    basis: Basis
    kind: Kind
    value: float
    bound: float
    holds: bool
    meaning: str


@dataclass(frozen=True, eq=False)
class Seen:
    """What held-out rows show of one stream, to be drawn.

    Attributes:
        checks: in their order.
        missed: shares of energy that are not in the first components, calibrated and held out, ``[r]``.
        kurtosis: of each coordinate that varies.
    """

    checks: tuple[Check, ...]
    missed: tuple[Tensor, Tensor]
    kurtosis: Tensor


def median(values: Sequence[float]) -> float:
    """Return the median of those that are finite; infinity where none is."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else math.inf
