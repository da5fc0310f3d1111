"""Lloyd-Max codebooks: the levels that lose least of a coordinate whose density is known.

Levels are centroids of their cells, edges midpoints of levels (Lloyd 1982, Max 1960). Densities are
symmetric, so half of a codebook is found. The start is where levels lie at high rates, at quantiles of the
cube root of the density (Panter and Dite 1951); sums over cells come from integrals over a fine grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GRID = 1 << 16
_ITERATIONS = 50_000
_CLOSE = 1e-10
_TAIL = 10.0
"""Standard deviations beyond which there is nothing."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Codebook:
    """Levels of a scalar quantiser.

    Attributes:
        levels: ascending, float32 ``[2**bits]``.
        edges: between them, float32 ``[2**bits - 1]``.
        distortion: expected squared error as a share of the energy.
    """

    levels: Tensor
    edges: Tensor
    distortion: float

    def nearest(self, x: Tensor) -> Tensor:
        """Return the code of each value, uint8."""
        return torch.bucketize(x, self.edges.to(x.device), out_int32=True).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Return the level of each code, float32."""
        return self.levels.to(codes.device)[codes.to(torch.int32)]


@lru_cache
def gaussian(bits: int) -> Codebook:
    """Return the codebook of a standard normal coordinate."""
    return _codebook(lambda t: np.exp(-t * t / 2), _TAIL, bits, energy=1.0)


@lru_cache
def beta(bits: int, dim: int) -> Codebook:
    """Return the codebook of a coordinate of a random unit vector of so many dimensions, at least 3."""
    power = (max(dim, 3) - 3) / 2
    limit = min(1.0, _TAIL / dim**0.5)
    return _codebook(lambda t: np.maximum(1 - t * t, 0) ** power, limit, bits, energy=1 / max(dim, 3))


def _codebook(density: Callable[[_Floats], _Floats], limit: float, bits: int, energy: float) -> Codebook:
    at = np.linspace(0, limit, _GRID + 1)
    found = density(at)
    mass, first = _integral(at, found), _integral(at, found * at)
    thin = _integral(at, np.cbrt(found))
    count = 2 ** (bits - 1)
    levels = np.interp((np.arange(count) + 0.5) / count * thin[-1], thin, at)
    inside = mass
    for _ in range(_ITERATIONS):
        edges = np.concatenate(([0], (levels[1:] + levels[:-1]) / 2, [limit]))
        inside = np.diff(np.interp(edges, at, mass))
        before, levels = levels, np.diff(np.interp(edges, at, first)) / inside
        if np.abs(levels - before).max() < _CLOSE * limit:
            break
    kept = float((inside * levels**2).sum() / mass[-1])
    whole = torch.from_numpy(np.concatenate((-levels[::-1], levels)))
    return Codebook(whole.float(), ((whole[1:] + whole[:-1]) / 2).float(), 1 - kept / energy)


def _integral(at: _Floats, values: _Floats) -> _Floats:
    """Integrate from the first point to each, by trapezoids."""
    steps = (values[1:] + values[:-1]) / 2 * np.diff(at)
    return np.concatenate(([0], np.cumsum(steps)))
