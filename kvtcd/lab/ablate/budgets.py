"""Dimensions that calibration finds, by the number of its rows: those of the data, or of the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtcd.lab.ablate.regimes import Shape, draw
from kvtcd.lab.dimension import dimension
from kvtcd.lab.statistics import Floats, Interval, interval, mean

ROWS = (16, 64, 128, 512, 4096)
_TRIALS = 6
WANTED = ("unit_sphere", "fattail", "lowrank", "lowrank_steep")
ISOTROPIC = WANTED[:2]
_ENOUGH = 64
"""Rows from which the corrected estimate is held to."""


@dataclass(frozen=True, slots=True)
class Found:
    """Participation ratios of rows of length one: medians over trials, and of each trial."""

    regime: str
    dim: int
    rows: int
    naive: float
    corrected: float
    limit: float
    naive_of_trials: tuple[float, ...]
    corrected_of_trials: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Law:
    """What the budget does to both ratios.

    Attributes:
        slope: of 1 / naive ratio over 1 / rows, by least squares in each trial, since its points are of the
            same draws and no sample of their own: mean over trials, and its interval.
        off: relative distance from d of the bounds of the corrected one, the mean over trials, at most.
    """

    regime: str
    slope: Interval
    off: float


def dimensions(seed: int, dim: int = 128) -> list[Found]:
    """Return the dimensions of some regimes at every number of rows."""
    found = []
    for regime in WANTED:
        for rows in ROWS:
            problem = draw(regime, Shape(dim, 2, 2, rows), seed=seed, trials=range(_TRIALS))
            unit = problem.key_rows / problem.key_rows.norm(dim=2, keepdim=True)
            each = [dimension(own) for own in unit]
            naive, corrected = tuple(one.naive for one in each), tuple(one.corrected for one in each)
            found.append(
                Found(
                    regime, dim, rows, float(np.median(naive)), float(np.median(corrected)), each[0].limit,
                    naive, corrected,
                )
            )  # fmt: skip
    return found


def law(found: list[Found], regime: str) -> Law:
    """Fit the law of one regime."""
    own = [one for one in found if one.regime == regime]
    inverse = 1 / np.array([one.naive_of_trials for one in own])  # [rows, trials]
    slopes = np.polyfit([1 / one.rows for one in own], inverse, 1)[0]
    bounds = [_of_trials(np.array(one.corrected_of_trials) / one.dim) for one in own if one.rows >= _ENOUGH]
    off = max(max(abs(one.lo - 1), abs(one.hi - 1)) for one in bounds)
    return Law(regime, _of_trials(slopes), off)


def _of_trials(values: Floats) -> Interval:
    return interval(mean(values), [0] * len(values))
