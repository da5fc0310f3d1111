"""How many dimensions rows have: the participation ratio of their second moment, naive and without its bias.

``PR = (sum of eigenvalues)^2 / sum of their squares``. Of n rows it is never more than n; on isotropic rows
of d dimensions it is near ``n d / (n + d)``, whatever calibration says it has found. With ``G = X X^T`` the
products of *different* rows are unbiased: ``A`` below estimates the square of the trace, ``B`` the trace of
the square.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dimension:
    """Of rows: `naive`, `corrected`, and `limit`, the naive one of isotropic rows of as many dimensions."""

    rows: int
    naive: float
    corrected: float
    limit: float


def dimension(rows: Tensor) -> Dimension:
    """Return the dimensions of rows ``[n, D]``, at least two, about zero."""
    n, d = rows.shape
    x = rows.to(torch.float64)
    # The smaller of X X^T and X^T X has the same sum of squares.
    gram = x @ x.t() if n < d else x.t() @ x
    squares = gram.square().sum()
    lengths = x.square().sum(dim=1)
    trace = lengths.sum()
    own = lengths.square().sum()
    return Dimension(
        rows=n,
        naive=float(trace**2 / squares.clamp_min(torch.finfo(torch.float64).tiny)),
        corrected=_corrected(float(trace**2 - own), float(squares - own)),
        limit=n * d / (n + d),
    )


def _corrected(traces: float, squares: float) -> float:
    """Return the ratio; rows that have nothing in common have no bound on their dimensions."""
    return traces / squares if squares > 0 else float("inf")
