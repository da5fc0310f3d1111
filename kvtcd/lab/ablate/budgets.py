"""Dimensions that calibration finds, by the number of its rows: those of the data, or of the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtcd.lab.ablate.regimes import Shape, draw
from kvtcd.lab.dimension import dimension

ROWS = (16, 64, 128, 512, 4096)
_TRIALS = 6
WANTED = ("unit_sphere", "fattail", "lowrank", "lowrank_steep")
ISOTROPIC = WANTED[:2]
_ENOUGH = 64
"""Rows from which the corrected estimate is held to."""


@dataclass(frozen=True, slots=True)
class Found:
    """Participation ratios of rows of length one, medians over trials."""

    regime: str
    dim: int
    rows: int
    naive: float
    corrected: float
    limit: float


@dataclass(frozen=True, slots=True)
class Law:
    """`slope` of 1 / naive ratio over 1 / rows; how far `off` d the corrected one is at most."""

    regime: str
    slope: float
    off: float


def dimensions(seed: int, dim: int = 128) -> list[Found]:
    """Return the dimensions of some regimes at every number of rows."""
    found = []
    for regime in WANTED:
        for rows in ROWS:
            problem = draw(regime, Shape(dim, 2, 2, rows), seed=seed, trials=range(_TRIALS))
            unit = problem.key_rows / problem.key_rows.norm(dim=2, keepdim=True)
            each = [dimension(own) for own in unit]
            naive, corrected = (
                float(np.median([getattr(one, which) for one in each])) for which in ("naive", "corrected")
            )
            found.append(Found(regime, dim, rows, naive, corrected, each[0].limit))
    return found


def law(found: list[Found], regime: str) -> Law:
    """Fit the law of one regime."""
    own = [one for one in found if one.regime == regime]
    slope = np.polyfit([1 / one.rows for one in own], [1 / one.naive for one in own], 1)[0]
    off = max(abs(one.corrected / one.dim - 1) for one in own if one.rows >= _ENOUGH)
    return Law(regime, float(slope), off)
